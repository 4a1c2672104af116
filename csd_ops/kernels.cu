// Verification and window logic on the GPU: csd_ops.reference.verify and .advance as three kernels.
//
//   csd_verify   grid (W, B)       one block per decision slot: laws, rule, residual, samples, measures
//   csd_advance  grid (W + C, B)   one block per row of the next state: first rejection, commit, shift, refill
//   csd_record   grid (1, B)       one block per image: note what was decided, lay out the next pass's noise
//
// float32 throughout; any V up to 65536; no workspace and no shared memory but a few kilobytes. Sums are taken in an
// order that depends on the block size alone, so that the same numbers give the same picture.
// Compiled by NVRTC for the GPU and, with tests/csd_ops/host_shim.h, by a C++ compiler for a block of one thread.

typedef long long i64;
typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

#define INF __uint_as_float(0x7f800000u)

#ifndef WARP
#define WARP 32       // lanes that exchange registers
#define THREADS 512   // per block; csd_ops.kernels launches with as many
#endif

#define TILE 256      // tokens per tile of the two-level sampling; TILE * TILES = the largest V
#define TILES 256
#define DIGITS 256    // bins of one radix pass

// csd_ops.contract: Kind, Form, Coupling, Fresh, the grammar and the order of Settings
enum { ABSENT = 0, FORCED = 1, FRESH = 2, DRAFTED = 3 };
enum { AFFINE = 0, JACOBI = 1, GROUP = 2 };
enum { INDEPENDENT = 0, MAXIMAL = 1, GUMBEL = 2 };
enum { UNIFORM = 0, ONE_HOT = 1, COPY_LEFT = 2, COPY_ABOVE = 3, LAW_LEFT = 4, LAW_ABOVE = 5 };
enum { NOTHING = -2, FREE = -1 };
enum {
    TEMPERATURE, TOP_K, TOP_P, RULE_FORM, COUPLING, FRESH_LAW, RELAX_FRESH, SCALE,
    DECAY, EPSILON, LAMBDA, DELTA, FLOOR, GROUP_SIZE, GROUP_PROBABILITY, GROUP_DISTANCE
};
enum { MEASURES = 6, NOISES = 3 };

// What the threads of a block share. One kernel, one block: one of these.
struct Shared {
    float sums[TILES];         // of the tiles
    float partial[32];         // of the warps
    float best[32];
    int place[32];
    u32 count[DIGITS];
    u64 mass[DIGITS];
    float number;
    int index;
};

// ---- the block: sums, maxima ------------------------------------------------------------------------------------

__device__ inline int lane() { return threadIdx.x % WARP; }
__device__ inline int warp() { return threadIdx.x / WARP; }
__device__ inline int warps() { return blockDim.x / WARP; }

__device__ inline float warp_sum(float x) {
    for (int step = WARP / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

// Sum over the block, the same in every thread.
__device__ float block_sum(Shared &s, float x) {
    x = warp_sum(x);
    if (lane() == 0) s.partial[warp()] = x;
    __syncthreads();
    float total = 0.0f;
    for (int i = 0; i < warps(); ++i) total += s.partial[i];
    __syncthreads();
    return total;
}

// Largest value over the block and the lowest place it stands at.
__device__ float block_best(Shared &s, float x, int place, int &where) {
    for (int step = WARP / 2; step > 0; step /= 2) {
        float other = __shfl_xor_sync(0xffffffffu, x, step);
        int there = __shfl_xor_sync(0xffffffffu, place, step);
        if (other > x || (other == x && there < place)) x = other, place = there;
    }
    if (lane() == 0) s.best[warp()] = x, s.place[warp()] = place;
    __syncthreads();
    x = s.best[0], where = s.place[0];
    for (int i = 1; i < warps(); ++i)
        if (s.best[i] > x || (s.best[i] == x && s.place[i] < where)) x = s.best[i], where = s.place[i];
    __syncthreads();
    return x;
}

// ---- sampling ---------------------------------------------------------------------------------------------------

// The sum of `own` over the lanes before this one.
__device__ inline float before_lane(float own) {
    float running = own;
    for (int step = 1; step < WARP; step *= 2) {
        float left = __shfl_up_sync(0xffffffffu, running, step);
        if (lane() >= step) running += left;
    }
    return running - own;
}

// Index at which the running sum of mass(v), v = 0..V-1, first exceeds uniform * total; `otherwise` where total is 0.
// Two levels: tiles, then the tokens of one tile. `mass` is asked twice for the tokens of the chosen tile.
template <class Mass>
__device__ int sample(Shared &s, int vocabulary, float uniform, int otherwise, Mass mass) {
    const int tiles = (vocabulary + TILE - 1) / TILE;
    for (int tile = warp(); tile < tiles; tile += warps()) {
        float sum = 0.0f;
        for (int i = lane(); i < TILE; i += WARP) {
            int v = tile * TILE + i;
            sum += v < vocabulary ? mass(v) : 0.0f;
        }
        sum = warp_sum(sum);
        if (lane() == 0) s.sums[tile] = sum;
    }
    __syncthreads();
    if (warp() == 0) {
        // which tile: each lane adds up a run of tiles
        const int run = (tiles + WARP - 1) / WARP, first = lane() * run;
        float own = 0.0f;
        for (int i = first; i < first + run && i < tiles; ++i) own += s.sums[i];
        float below = before_lane(own);
        float total = __shfl_sync(0xffffffffu, below + own, WARP - 1);
        const float threshold = uniform * total;
        int chosen = tiles;
        float behind = 0.0f;
        for (int i = first; i < first + run && i < tiles; ++i) {
            if (chosen == tiles && below + s.sums[i] > threshold) chosen = i, behind = below;
            below += s.sums[i];
        }
        for (int step = WARP / 2; step > 0; step /= 2) {
            int other = __shfl_xor_sync(0xffffffffu, chosen, step);
            float there = __shfl_xor_sync(0xffffffffu, behind, step);
            if (other < chosen) chosen = other, behind = there;
        }
        if (chosen == tiles) {  // only by rounding: the last tile that holds anything
            chosen = 0;
            for (int i = 0; i < tiles; ++i) chosen = s.sums[i] > 0.0f ? i : chosen;
            behind = -1.0f;
        }
        // which token of it
        const int each = TILE / WARP, start = chosen * TILE + lane() * each;
        own = 0.0f;
        for (int i = 0; i < each; ++i) own += start + i < vocabulary ? mass(start + i) : 0.0f;
        below = behind + before_lane(own);
        int token = vocabulary, last = -1;
        for (int i = 0; i < each && start + i < vocabulary; ++i) {
            float here = mass(start + i);
            below += here;
            if (token == vocabulary && behind >= 0.0f && below > threshold) token = start + i;
            if (here > 0.0f) last = start + i;
        }
        for (int step = WARP / 2; step > 0; step /= 2) {
            token = min(token, __shfl_xor_sync(0xffffffffu, token, step));
            last = max(last, __shfl_xor_sync(0xffffffffu, last, step));
        }
        if (token == vocabulary) token = last;
        if (lane() == 0) s.index = total > 0.0f && token >= 0 ? token : otherwise;
    }
    __syncthreads();
    int chosen = s.index;
    __syncthreads();
    return chosen;
}

// ---- selection without a sort -----------------------------------------------------------------------------------

// Floats as unsigned integers of the same order.
__device__ inline u32 ordered(float x) {
    u32 bits = __float_as_uint(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ inline float unordered(u32 key) {
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// The k-th largest of row[0..V-1]: a radix selection, one pass for each byte from the highest.
__device__ float kth_largest(Shared &s, const float *row, int vocabulary, int k) {
    u32 prefix = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (int i = threadIdx.x; i < DIGITS; i += blockDim.x) s.count[i] = 0;
        __syncthreads();
        for (int v = threadIdx.x; v < vocabulary; v += blockDim.x) {
            u32 key = ordered(row[v]);
            if (shift == 24 || key >> (shift + 8) == prefix) atomicAdd(&s.count[(key >> shift) & 255], 1u);
        }
        __syncthreads();
        int digit = DIGITS - 1;  // every thread walks the bins alike
        for (; digit > 0 && (int)s.count[digit] < k; --digit) k -= (int)s.count[digit];
        prefix = prefix << 8 | (u32)digit;
        __syncthreads();
    }
    return unordered(prefix);
}

// The least value v of row with mass(row > v) < limit, for a row of probabilities: the same selection, weighted.
// Masses are integers of 2^-40, whose sums do not depend on the order of the atomics.
__device__ float least_within(Shared &s, const float *row, int vocabulary, float limit) {
    const u64 wanted = (u64)((double)limit * 1099511627776.0);
    u32 prefix = 0;
    u64 above = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (int i = threadIdx.x; i < DIGITS; i += blockDim.x) s.mass[i] = 0, s.count[i] = 0;
        __syncthreads();
        for (int v = threadIdx.x; v < vocabulary; v += blockDim.x) {
            u32 key = ordered(row[v]);
            if (shift == 24 || key >> (shift + 8) == prefix) {
                atomicAdd(&s.mass[(key >> shift) & 255], (u64)((double)row[v] * 1099511627776.0));
                s.count[(key >> shift) & 255] = 1;
            }
        }
        __syncthreads();
        int digit = -1;  // every thread walks the bins alike
        u64 passed = above, kept = above;
        for (int i = DIGITS - 1; i >= 0; --i) {
            if (s.count[i] && passed < wanted) digit = i, kept = passed;
            passed += s.mass[i];
        }
        if (digit < 0) {  // limit 0: the likeliest token alone
            for (int i = 0; i < DIGITS; ++i) digit = s.count[i] ? i : digit;
            kept = above;
        }
        above = kept;
        prefix = prefix << 8 | (u32)digit;
        __syncthreads();
    }
    return unordered(prefix);
}

// ---- the row of one decision slot -------------------------------------------------------------------------------

// Guidance and temperature, equation of reference.target_law: scores of one slot, from the logits of its rows.
struct Scores {
    const float *conditional, *unconditional;
    float weight, other;
    __device__ float operator()(int v) const {
        return other == 0.0f ? conditional[v] * weight : conditional[v] * weight + unconditional[v] * other;
    }
};

// The target law as a function of the scores: e^(z - best) / total where z is not below the least score kept.
struct Law {
    Scores score;
    float least, best, total;
    __device__ float operator()(int v) const {
        float z = score(v);
        return z < least ? 0.0f : expf(z - best) / total;
    }
};

// Whether token a ranks before token b: higher probability, then lower index. All that truncation removed or that lies
// below `lowest`, the score of the rule's floor, is equally improbable.
__device__ inline bool ranks_before(const Law &law, float lowest, int a, int b) {
    float x = law.score(a), y = law.score(b);
    x = x < law.least ? lowest : fmaxf(x, lowest), y = y < law.least ? lowest : fmaxf(y, lowest);
    return x > y || (x == y && a < b);
}

// order[r] = the token of rank r: a bitonic network in which every exchange puts the better token at the lower place,
// so that the places past V (the worst of all) never move and need not exist.
__device__ void rank(const Law &law, float lowest, u32 *order, int vocabulary) {
    for (int v = threadIdx.x; v < vocabulary; v += blockDim.x) order[v] = v;
    __syncthreads();
    int padded = 1;
    while (padded < vocabulary) padded *= 2;
    for (int size = 2; size <= padded; size *= 2) {
        for (int step = size / 2; step > 0; step /= 2) {
            for (int i = threadIdx.x; i < padded / 2; i += blockDim.x) {
                int low = i / step * (2 * step) + i % step;
                int high = step == size / 2 ? low / size * size + size - 1 - low % size : low + step;
                if (high < vocabulary && ranks_before(law, lowest, (int)order[high], (int)order[low])) {
                    u32 swap = order[low];
                    order[low] = order[high], order[high] = swap;
                }
            }
            __syncthreads();
        }
    }
}

// b of the token at a rank: the ratio of group masses, algorithm 3 of arXiv 2508.07747.
struct GroupRule {
    Law law;
    const float *p, *codes, *settings;
    const u32 *order;
    int vocabulary, width;
    __device__ float operator()(int at) const {
        const int reach = ((int)settings[GROUP_SIZE] - 1) / 2, x = (int)order[at];
        const float floor = settings[FLOOR], q_x = fmaxf(law(x), floor);
        float mass_q = 0.0f, mass_p = 0.0f;
        for (int r = max(0, at - reach); r <= min(vocabulary - 1, at + reach); ++r) {
            const int y = (int)order[r];
            const float q_y = fmaxf(law(y), floor);
            float distance = 0.0f;
            for (int e = 0; e < width; ++e) {
                float step = codes[(i64)y * width + e] - codes[(i64)x * width + e];
                distance += step * step;
            }
            bool member = fabsf(q_y - q_x) < settings[GROUP_PROBABILITY] && distance < settings[GROUP_DISTANCE];
            if (member || r == at) mass_q += q_y, mass_p += fmaxf(p[y], floor);
        }
        return mass_p > 0.0f ? fminf(mass_q / mass_p, 1.0f) : 0.0f;
    }
};

__device__ inline float surprise(float probability) { return -logf(fmaxf(probability, 1e-30f)); }

extern "C" __global__ void __launch_bounds__(THREADS) csd_verify(
    const float *logits,       // [G * B, W, V]
    const i64 *ids,            // [G * B, W]
    const i64 *kind,           // [B, W]
    const float *draft_probs,  // [B, W, V]
    const float *uniforms,     // [B, W, 3]
    const float *gumbel,       // [B, W, N]
    const float *guidance,     // [G]
    const float *settings,     // [16]
    const float *codes,        // [V, E]
    int images, int window, int vocabulary, int noise, int groups, int width,
    float *q,                  // [B, W, V]
    u8 *accept,                // [B, W]
    i64 *final,                // [B, W]
    i64 *redraft,              // [B, W]
    float *measures            // [B, W, 6]
) {
    __shared__ Shared s;
    const int slot = blockIdx.x, image = blockIdx.y;
    const i64 at = (i64)image * window + slot;
    float *row = q + at * vocabulary;
    const int form = (int)settings[RULE_FORM], coupling = (int)settings[COUPLING];
    const int what = (int)kind[at];
    const bool real = what >= FRESH;
    const int x = real && slot + 1 < window ? (int)ids[at + 1] : 0;
    const float u_accept = uniforms[at * NOISES], u_sample = uniforms[at * NOISES + 1];

    // the target law q: guidance, temperature, top-k, top-p, softmax
    Law law;
    law.score.conditional = logits + at * vocabulary;
    law.score.unconditional = logits + ((i64)(groups - 1) * images * window + at) * vocabulary;
    law.score.weight = guidance[0] / settings[TEMPERATURE];
    law.score.other = groups > 1 ? guidance[1] / settings[TEMPERATURE] : 0.0f;
    law.least = -INF;
    float best = -INF;
    int where = 0;
    for (int v = threadIdx.x; v < vocabulary; v += blockDim.x) {
        float z = law.score(v);
        row[v] = z;
        if (z > best) best = z, where = v;
    }
    law.best = block_best(s, best, where, where);
    if (settings[TOP_K] > 0.0f)
        law.least = kth_largest(s, row, vocabulary, min((int)settings[TOP_K], vocabulary));
    float total = 0.0f, weighted = 0.0f;  // sum e^(z - best), sum (z - best) e^(z - best)
    for (int v = threadIdx.x; v < vocabulary; v += blockDim.x) {
        float z = row[v], e = z < law.least ? 0.0f : expf(z - law.best);
        total += e;
        weighted += e > 0.0f ? e * (z - law.best) : 0.0f;
    }
    law.total = block_sum(s, total);
    weighted = block_sum(s, weighted);
    if (settings[TOP_P] < 1.0f) {
        for (int v = threadIdx.x; v < vocabulary; v += blockDim.x) row[v] = law(v);
        __syncthreads();
        const float least = least_within(s, row, vocabulary, settings[TOP_P]);
        // the least score of the tokens kept, for Law
        float low = INF;
        total = 0.0f, weighted = 0.0f;
        for (int v = threadIdx.x; v < vocabulary; v += blockDim.x) {
            if (row[v] < least) continue;
            float z = law.score(v);
            if (z < law.least) continue;
            float e = expf(z - law.best);
            low = fminf(low, z);
            total += e;
            weighted += e > 0.0f ? e * (z - law.best) : 0.0f;
        }
        int unused;
        law.least = -block_best(s, -low, 0, unused);
        law.total = block_sum(s, total);
        weighted = block_sum(s, weighted);
    }
    const float entropy = fmaxf(logf(law.total) - weighted / law.total, 0.0f);

    // the rule: b(x) p(x) of every token is min(p, scale q + bonus p), or by groups
    const float *p = draft_probs + at * vocabulary;
    const float floor = settings[FLOOR];
    float variation = 0.0f, chance = 0.0f, distortion = 0.0f;
    float q_x = fmaxf(law(x), floor), p_x = real ? fmaxf(p[x], floor) : 0.0f;
    const float target_x = law(x);
    if (real && form == GROUP) {
        // ranks need room: the row of q, which is written last
        u32 *order = (u32 *)row;
        __syncthreads();
        rank(law, floor > 0.0f ? law.best + logf(floor * law.total) : -INF, order, vocabulary);
        const GroupRule rule = {law, p, codes, settings, order, vocabulary, width};
        float rejected = 0.0f, mass = 0.0f, difference = 0.0f;
        if (threadIdx.x == 0) s.number = 0.0f;
        __syncthreads();
        for (int r = threadIdx.x; r < vocabulary; r += blockDim.x) {
            const int v = (int)order[r];
            const float p_v = fmaxf(p[v], floor), q_v = fmaxf(law(v), floor), b = rule(r);
            if (v == x) s.number = b;
            rejected += p_v - b * p_v;
            mass += fmaxf(q_v - p_v, 0.0f);
            variation += fabsf(p_v - q_v);
        }
        rejected = block_sum(s, rejected);
        mass = block_sum(s, mass);
        variation = 0.5f * block_sum(s, variation);
        chance = p_x > 0.0f ? s.number : 0.0f;
        const float share = rejected / fmaxf(mass, 1e-30f);
        for (int r = threadIdx.x; r < vocabulary; r += blockDim.x) {
            const int v = (int)order[r];
            const float p_v = fmaxf(p[v], floor), q_v = fmaxf(law(v), floor);
            difference += fabsf(rule(r) * p_v + fmaxf(q_v - p_v, 0.0f) * share - q_v);
        }
        distortion = 0.5f * block_sum(s, difference);
    }
    __syncthreads();
    for (int v = threadIdx.x; v < vocabulary; v += blockDim.x) {
        const float q_v = law(v);
        row[v] = q_v;
        if (real && form != GROUP) variation += fabsf(fmaxf(p[v], floor) - fmaxf(q_v, floor));
    }
    __syncthreads();
    const float scale = settings[SCALE] * expf(-settings[DECAY] * (float)slot);
    int other = x;
    if (real) {
        float bonus = 0.0f, share = 1.0f;
        if (form != GROUP) {
            variation = 0.5f * block_sum(s, variation);
            const bool relaxed = what == DRAFTED || settings[RELAX_FRESH] > 0.0f;
            if (relaxed) bonus = settings[EPSILON] + (variation < settings[DELTA] ? settings[LAMBDA] * entropy : 0.0f);
            share = scale;
            chance = fminf(scale * q_x / fmaxf(p_x, 1e-38f) + bonus, 1.0f);
            float rejected = 0.0f;
            for (int v = threadIdx.x; v < vocabulary; v += blockDim.x) {
                const float p_v = fmaxf(p[v], floor);
                rejected += p_v - fminf(p_v, fmaxf(row[v], floor) * share + p_v * bonus);
            }
            distortion = fmaxf(variation - block_sum(s, rejected), 0.0f);  // theorem 3.2
        }
        other = sample(s, vocabulary, u_sample, x, [=](int v) {
            const float q_v = fmaxf(row[v], floor), p_v = fmaxf(p[v], floor);
            return fmaxf(q_v - fminf(p_v, q_v * share + p_v * bonus), 0.0f);
        });
    }
    int drawn = other;
    if (coupling == GUMBEL) {
        best = -INF, where = vocabulary;
        for (int v = threadIdx.x; v < vocabulary; v += blockDim.x) {
            float value = logf(fmaxf(row[v], 1e-38f)) + gumbel[at * noise + v];
            if (value > best) best = value, where = v;
        }
        block_best(s, best, where, drawn);
    } else if (coupling == MAXIMAL && real) {
        if (u_accept * p_x < q_x)
            drawn = x;
        else if (form == AFFINE && scale < 1.0f)  // below scale 1 the rule's residual is another
            drawn = sample(s, vocabulary, u_sample, x, [=](int v) {
                return fmaxf(fmaxf(row[v], floor) - fmaxf(p[v], floor), 0.0f);
            });
    } else if (coupling == INDEPENDENT || !real) {
        drawn = sample(s, vocabulary, u_sample, 0, [=](int v) { return row[v]; });
    }
    if (!real && coupling == GUMBEL)
        other = sample(s, vocabulary, u_sample, 0, [=](int v) { return row[v]; });
    else if (!real)
        other = drawn;
    const int chosen = form == JACOBI ? drawn : other;
    if (threadIdx.x == 0) {
        const bool accepted = form == JACOBI ? drawn == x : u_accept < chance;
        accept[at] = (real && accepted) || what == FORCED;
        final[at] = chosen;
        redraft[at] = drawn;
        float *measured = measures + at * MEASURES;
        measured[0] = entropy;
        measured[1] = real ? variation : 0.0f;
        measured[2] = !real ? 0.0f : form == JACOBI ? q_x : chance;
        measured[3] = !real || form == JACOBI ? 0.0f : distortion;
        measured[4] = surprise(target_x);
        measured[5] = surprise(row[chosen]);
    }
}

// ---- window logic -----------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(THREADS) csd_advance(
    const i64 *ids,              // [R, W]
    const i64 *length,           // [R]
    const i64 *position,         // [B]
    const float *history_probs,  // [B, C, V]
    const i64 *history_ids,      // [B, C]
    const float *q,              // [B, W, V]
    const u8 *accept,            // [B, W]
    const i64 *final,            // [B, W]
    const i64 *redraft,          // [B, W]
    const float *uniforms,       // [B, W, 3]
    const i64 *grammar,          // [T]
    const float *settings,       // [16]
    int rows, int images, int window, int vocabulary, int columns, int places,
    i64 *next_ids,               // [R, W]
    i64 *next_length,            // [R]
    i64 *next_position,          // [B]
    i64 *next_kind,              // [B, W]
    float *next_draft_probs,     // [B, W, V]
    float *next_history_probs,   // [B, C, V]
    i64 *next_history_ids,       // [B, C]
    i64 *committed,              // [B]
    i64 *tokens                  // [B, W]
) {
    __shared__ Shared s;
    const int image = blockIdx.y, slot = blockIdx.x;  // slots of the window, then rows of history
    const i64 base = (i64)image * window;
    const i64 start = position[image];
    int leading = 0;
    while (leading < window - 1 && accept[base + leading]) ++leading;
    int count = 0;
    for (int k = 0; k <= leading; ++k) count += grammar[start + k] != NOTHING;
    auto token = [=](int k) -> i64 {
        const i64 forced = grammar[start + k];
        if (forced >= 0) return forced;
        if (k == leading) return final[base + k];
        return k < leading ? ids[base + k + 1] : redraft[base + k];
    };
    // row r of the known laws is that of position start - C + r
    auto law = [=](int r) { return r < columns ? history_probs + ((i64)image * columns + r) * vocabulary
                                               : q + (base + r - columns) * vocabulary; };
    auto name = [=](int r) { return r < columns ? history_ids[(i64)image * columns + r] : token(r - columns); };

    if (slot >= window) {  // a row of history
        const int r = slot - window;
        const float *from = law(count + r);
        float *to = next_history_probs + ((i64)image * columns + r) * vocabulary;
        for (int v = threadIdx.x; v < vocabulary; v += blockDim.x) to[v] = from[v];
        if (threadIdx.x == 0) next_history_ids[(i64)image * columns + r] = name(count + r);
        return;
    }

    const int old = count + slot;  // this position's slot in the pass just made
    const i64 place = start + old;
    const i64 rule = grammar[min(place, (i64)places - 1)];
    const float u = uniforms[(base + slot) * NOISES + 2];
    const int scheme = (int)settings[FRESH_LAW], last = columns + window - 1;
    const float *from = 0;       // the law to copy; otherwise all `flat`, and 1 at `peak`
    float flat = 0.0f;
    int peak = -1, what = ABSENT;
    i64 draft = 0;
    if (rule >= 0) {
        what = FORCED, draft = rule;
    } else if (rule == NOTHING || slot == window - 1) {
        what = ABSENT;
    } else if (old < window) {
        what = DRAFTED, draft = token(old), from = law(columns + old);
    } else {
        what = FRESH;
        const bool has_above = place >= columns;
        const int above = min(old, last), anywhere = min((int)(u * (float)vocabulary), vocabulary - 1);
        draft = anywhere;
        if (scheme == LAW_LEFT || (scheme == LAW_ABOVE && has_above)) {
            from = law(scheme == LAW_LEFT ? last : above);
            draft = sample(s, vocabulary, u, anywhere, [=](int v) { return from[v]; });
        } else if (scheme == UNIFORM || scheme == LAW_ABOVE) {
            flat = 1.0f / (float)vocabulary;
        } else {
            if (scheme == COPY_LEFT || (scheme == COPY_ABOVE && has_above)) {
                const i64 copied = name(scheme == COPY_LEFT ? last : above);
                if (copied < vocabulary) draft = copied;
            }
            peak = (int)draft;
        }
    }
    float *to = next_draft_probs + (base + slot) * vocabulary;
    for (int v = threadIdx.x; v < vocabulary; v += blockDim.x) to[v] = from ? from[v] : v == peak ? 1.0f : flat;
    if (threadIdx.x) return;
    next_kind[base + slot] = what;
    tokens[base + slot] = token(slot);
    for (int r = image; r < rows; r += images) {  // guidance rows carry the same image tokens
        if (slot + 1 < window) next_ids[(i64)r * window + slot + 1] = draft;
        if (slot == 0) {
            next_ids[(i64)r * window] = count ? token(count - 1) : ids[base];
            next_length[r] = length[r] + count;
        }
    }
    if (slot == 0) {
        next_position[image] = start + count;
        committed[image] = count;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) csd_record(
    const i64 *ids,          // [R, W] as the pass was fed
    const i64 *kind,         // [B, W]
    const i64 *position,     // [B]
    const i64 *committed,    // [B]
    const i64 *tokens,       // [B, W]
    const float *measures,   // [B, W, 6]
    const float *noise,      // [B, P, W, 3] of every pass
    const float *gumbels,    // [B, N + W, V] of every position, or one number
    int window, int vocabulary, int image_tokens, int passes, int gumbel_size,
    i64 *pass,               // [B] passes that decided something
    float *uniforms,         // [B, W, 3] of the next pass
    float *gumbel,           // [B, W, V]
    i64 *picture_tokens,     // [B, N]
    i64 *picture_kind,       // [B, N]
    i64 *picture_draft,      // [B, N]
    i64 *picture_pass,       // [B, N]
    float *picture_measures  // [B, N, 6]
) {
    const int image = blockIdx.y, count = (int)committed[image];
    if (!count) return;
    const i64 base = (i64)image * window, to = (i64)image * image_tokens + position[image];
    const i64 done = pass[image] + 1;  // the first pass after the prompt's is 1
    for (int k = threadIdx.x; k < count; k += blockDim.x) {
        picture_tokens[to + k] = tokens[base + k];
        picture_kind[to + k] = kind[base + k];
        picture_draft[to + k] = k + 1 < window ? ids[base + k + 1] : 0;
        picture_pass[to + k] = done;
        for (int i = 0; i < MEASURES; ++i) picture_measures[(to + k) * MEASURES + i] = measures[(base + k) * MEASURES + i];
    }
    const i64 next = min(done, (i64)passes - 1);
    for (int i = threadIdx.x; i < window * NOISES; i += blockDim.x)
        uniforms[base * NOISES + i] = noise[((i64)image * passes + next) * window * NOISES + i];
    if (gumbel_size > 1) {
        const i64 from = ((i64)image * (image_tokens + window) + position[image] + count) * vocabulary;
        for (int i = threadIdx.x; i < window * vocabulary; i += blockDim.x)
            gumbel[base * vocabulary + i] = gumbels[from + i];
    }
    __syncthreads();
    if (threadIdx.x == 0) pass[image] = done;
}
