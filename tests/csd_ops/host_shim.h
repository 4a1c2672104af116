// Lets a C++ compiler read csd_ops/kernels.cu for the host: a block is one thread, a warp one lane.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>

using std::max;
using std::min;

#define __global__
#define __device__
#define __shared__ static thread_local
#define __launch_bounds__(threads)
#define WARP 1
#define THREADS 1

struct Place {
    unsigned x, y, z;
};
static thread_local Place threadIdx, blockIdx, blockDim{1, 1, 1};
extern "C" void host_block(unsigned x, unsigned y) { blockIdx = {x, y, 0}; }

inline void __syncthreads() {}
template <class T> T __shfl_xor_sync(unsigned, T value, int) { return value; }
template <class T> T __shfl_up_sync(unsigned, T value, int) { return value; }
template <class T> T __shfl_sync(unsigned, T value, int) { return value; }
template <class T> void atomicAdd(T *to, T value) { *to += value; }
inline unsigned __float_as_uint(float x) { unsigned y; std::memcpy(&y, &x, 4); return y; }
inline float __uint_as_float(unsigned x) { float y; std::memcpy(&y, &x, 4); return y; }
