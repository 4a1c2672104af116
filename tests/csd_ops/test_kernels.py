"""The CUDA kernels: compiled for the host they equal the reference; compiled to PTX they are what the table says."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings

from csd_ops.contract import Coupling, Settings
from csd_ops.errors import InputError
from csd_ops.kernels import (
    ADVANCE,
    ARCHITECTURES,
    KERNELS,
    LARGEST_VOCABULARY,
    RECORD,
    THREADS,
    VERIFY,
    Kernel,
    compile_kernels,
)
from csd_ops.rules import Csd, Gsd, Sjd
from tests.csd_ops.backends import EXTREMES, Backend, base_case, cases, compare, set_middle
from tests.csd_ops.cases import Case, generate
from tests.csd_ops.host_kernels import COMPILER, launch, outputs

host = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


def run(case: Case) -> dict[str, np.ndarray]:
    """Both kernels on the host."""
    images, window, vocabulary = case.state.draft_probs.shape
    sizes = {
        "B": images,
        "W": window,
        "V": vocabulary,
        "R": len(case.state.ids),
        "G": len(case.guidance),
        "N": case.gumbel.shape[-1],
        "E": case.codes.shape[1],
        "C": case.state.history_ids.shape[1],
        "T": len(case.grammar),
    }
    judged = outputs(VERIFY, sizes)
    inputs = {name: np.ascontiguousarray(array) for name, array in (case.inputs() | {"codes": case.codes}).items()}
    launch(VERIFY, inputs | judged, sizes)
    following = outputs(ADVANCE, sizes)
    launch(ADVANCE, inputs | judged | following, sizes)
    return judged | following


@host
@hypothesis_settings(max_examples=400, deadline=None)
@given(case=cases())
def test_every_rule_coupling_and_fresh_law(case: Case) -> None:
    compare(run, case)


@host
@pytest.mark.parametrize("extreme", EXTREMES, ids=lambda extreme: extreme.__name__)
def test_extremes(extreme: Callable[[Backend], None]) -> None:
    extreme(run)


@host
@pytest.mark.parametrize(("vocabulary", "top_k"), [(1000, 50), (16384, 2000), (LARGEST_VOCABULARY, 0)])
@pytest.mark.parametrize("coupling", Coupling)
def test_large_vocabulary(vocabulary: int, top_k: int, coupling: Coupling) -> None:
    settings = Settings(top_k=top_k, top_p=0.9 if top_k else 1.0, coupling=coupling, **Csd().settings())
    compare(run, generate(1, settings, images=1, window=3, vocabulary=vocabulary, columns=2, tokens=64))


@host
def test_groups_at_a_large_vocabulary() -> None:
    settings = Settings(**Gsd(size=5).settings())
    compare(run, generate(2, settings, images=1, window=2, vocabulary=2000, columns=2, tokens=64))


def flat_tail() -> Case:
    """Most tokens lie below the floor: equally improbable, and ranked by their index."""
    settings = Settings(temperature=0.5, floor=1e-10, **Gsd(5, 0.5, math.inf).settings())
    case = generate(4, settings, images=3, window=6, vocabulary=33, guidance=5.0, spread=5.0)
    assert (case.verify().q < 1e-10).mean() > 0.6
    return case


@host
def test_groups_rank_what_lies_below_the_floor_by_index() -> None:
    compare(run, flat_tail())


@host
def test_truncation_keeps_ties() -> None:
    case = base_case(top_k=3, top_p=0.99)
    logits = np.round(case.logits)  # many equal scores
    from dataclasses import replace

    compare(run, replace(case, logits=logits))


@host
def test_record_writes_the_picture_and_lays_out_the_next_noise() -> None:
    sizes = {"B": 2, "W": 3, "V": 4, "I": 10, "P": 5, "N": 4, "R": 4}
    generator = np.random.default_rng(0)
    arrays = {
        name: (generator.random(RECORD.shapes(sizes)[name]) * 9).astype(dtype)
        for name, (dtype, _) in (RECORD.inputs | RECORD.outputs).items()
    }
    arrays["position"][:], arrays["committed"][:], arrays["passes"][:] = (4, 7), (3, 0), (1, 2)
    before = {name: array.copy() for name, array in arrays.items()}
    launch(RECORD, arrays, sizes)
    at = slice(4, 7)
    np.testing.assert_array_equal(arrays["picture_tokens"][0, at], before["tokens"][0])
    np.testing.assert_array_equal(arrays["picture_kind"][0, at], before["kind"][0])
    np.testing.assert_array_equal(arrays["picture_draft"][0, at], [*before["ids"][0, 1:], 0])
    np.testing.assert_array_equal(arrays["picture_measures"][0, at], before["measures"][0])
    np.testing.assert_array_equal(arrays["picture_pass"][0, at], [2, 2, 2])
    np.testing.assert_array_equal(arrays["passes"], [2, 2])
    np.testing.assert_array_equal(arrays["uniforms"][0], before["noise"][0, 2])
    np.testing.assert_array_equal(arrays["gumbel"][0], before["gumbels"][0, 7:10])
    for name in RECORD.outputs:  # the second image decided nothing: it is left alone
        np.testing.assert_array_equal(arrays[name][1], before[name][1], err_msg=name)
        if name.startswith("picture"):
            np.testing.assert_array_equal(np.delete(arrays[name][0], at, 0), np.delete(before[name][0], at, 0))


@host
def test_comparison_notices_a_wrong_kernel() -> None:
    case = set_middle(base_case())

    def wrong(case: Case) -> dict[str, np.ndarray]:
        got = run(case)
        got["next_length"] += 1
        return got

    with pytest.raises(AssertionError, match="length"):
        compare(wrong, case)


SANITIZED = """
from csd_ops.contract import Coupling, Fresh, Settings
from csd_ops.rules import Csd, Gsd, Jacobi
from tests.csd_ops.backends import compare
from tests.csd_ops.cases import generate
from tests.csd_ops.test_kernels import run, test_record_writes_the_picture_and_lays_out_the_next_noise
for seed, (rule, coupling, fresh) in enumerate(zip((Csd(), Gsd(size=5), Jacobi()) * 2, list(Coupling) * 2, Fresh)):
    for vocabulary in (3, 100, 256, 300):
        settings = Settings(top_k=2, top_p=0.9, coupling=coupling, fresh=fresh, **rule.settings())
        compare(run, generate(seed, settings, window=6, vocabulary=vocabulary, forced={2: vocabulary + 1}))
test_record_writes_the_picture_and_lays_out_the_next_noise()
print("clean")
"""


OVERRUN = """
import numpy as np
from csd_ops.kernels import RECORD
from tests.csd_ops.host_kernels import launch
sizes = dict(B=1, W=3, V=4, I=10, P=5, N=1, R=1)
arrays = {n: np.zeros(RECORD.shapes(sizes)[n], d) for n, (d, _) in (RECORD.inputs | RECORD.outputs).items()}
arrays["committed"][:], arrays["position"][:] = 3, 9
launch(RECORD, arrays, sizes)
"""


@host
@pytest.mark.skipif(sys.platform != "linux", reason="preloads the sanitizer's library as on Linux")
@pytest.mark.parametrize("overrun", [False, True], ids=["clean", "an overrun is noticed"])
def test_no_access_outside_the_buffers(overrun: bool) -> None:
    """Under AddressSanitizer; every array is an allocation of its own, so a stray access is seen."""
    assert COMPILER
    found = subprocess.run([COMPILER, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    if not os.path.isabs(found.stdout.strip()):
        pytest.skip("the compiler has no AddressSanitizer")
    script = SANITIZED + (OVERRUN if overrun else "")
    environment = os.environ | {
        "LD_PRELOAD": found.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONMALLOC": "malloc",
        "CSD_HOST_FLAGS": "-fsanitize=address -fno-omit-frame-pointer -g",
    }
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    if overrun:
        assert done.returncode and "ERROR: AddressSanitizer: heap-buffer-overflow" in done.stderr
    else:
        assert done.returncode == 0 and "clean" in done.stdout, done.stderr[-2000:]


# ---- PTX ---------------------------------------------------------------------------------------------------------


def entries(ptx: str) -> dict[str, list[str]]:
    """Entry name -> types of its parameters, in order."""
    found = re.findall(r"\.visible \.entry (\w+)\((.*?)\)\s*\.maxntid (\d+)", ptx, re.S)
    assert all(int(threads) == THREADS for _, _, threads in found)
    return {name: re.findall(r"\.param (?:\.\w+ )*?\.(u64|u32|s32|b64|b32)", body) for name, body, _ in found}


@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_ptx_has_the_entries_and_parameters_of_the_table(capability: int) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    code, log = compile_kernels(capability)
    ptx = code.decode()
    assert not log
    assert f".target sm_{capability}" in ptx
    assert ".version 9.0" in ptx, "loads on every driver of CUDA 13"
    assert set(entries(ptx)) == {kernel.name for kernel in KERNELS}
    for kernel in KERNELS:
        wanted = ["64"] * len(kernel.inputs) + ["32"] * len(kernel.scalars) + ["64"] * len(kernel.outputs)
        assert [kind[1:] for kind in entries(ptx)[kernel.name]] == wanted, kernel.name
    assert ".local " not in ptx, "no local memory"


def test_parameter_names_are_in_the_order_of_the_table() -> None:
    """PTX keeps the count and types alone; the names are read from the source."""
    from csd_ops.kernels import SOURCE

    source = re.sub(r"//[^\n]*", "", SOURCE.read_text("utf-8"))
    words = {"B": "images", "W": "window", "V": "vocabulary", "N": ("noise", "gumbel_size"), "G": "groups"}
    words |= {"E": "width", "R": "rows", "C": "columns", "T": "places", "I": "image_tokens", "P": "passes"}
    for kernel in KERNELS:
        body = re.search(rf"{kernel.name}\((.*?)\) \{{", source, re.S)
        assert body
        parameters = [parameter.split() for parameter in body[1].split(",")]
        names = [parameter[-1].lstrip("*") for parameter in parameters]
        pointers = [name for name, parameter in zip(names, parameters, strict=True) if parameter[-1].startswith("*")]
        renamed = ["pass" if name == "passes" else name for name in (*kernel.inputs, *kernel.outputs)]
        assert pointers == renamed
        sizes = [name for name, parameter in zip(names, parameters, strict=True) if parameter[0] == "int"]
        for name, symbol in zip(sizes, kernel.scalars, strict=True):
            assert name in words[symbol]
        types = {"float32": "float", "int64": "i64", "bool": "u8"}
        for name, parameter in zip(names, parameters, strict=True):
            entry = (kernel.inputs | kernel.outputs).get("passes" if name == "pass" else name)
            if entry and parameter[-1].startswith("*"):
                assert types[entry[0]] in parameter, name


@pytest.mark.parametrize("capability", [80, 90, 120])
def test_machine_code_spills_nothing(capability: int) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    _, log = compile_kernels(capability, binary=True)
    assert log.count("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads") == len(KERNELS), log
    registers = [int(number) for number in re.findall(r"Used (\d+) registers", log)]
    assert len(registers) == len(KERNELS) and max(registers) * THREADS <= 65536, "a block fits"
    shared = [int(number) for number in re.findall(r"(\d+) bytes smem", log)]
    assert max(shared) <= 8192


def test_unknown_capability_is_refused() -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    with pytest.raises(InputError, match=r"expected a compute capability of .*, found 12;"):
        compile_kernels(12)


def test_sizes_are_sums() -> None:
    kernel = Kernel("k", {"a": ("float32", ("B", "W + C"))}, ("W + 1",), {}, ("W + C", "B"))
    sizes = {"B": 2, "W": 3, "C": 4}
    assert kernel.shapes(sizes) == {"a": (2, 7)}
    assert kernel.launch_grid(sizes) == (7, 2, 1)
    assert kernel.scalar_values(sizes) == [4]


def test_exact_settings_have_no_distortion() -> None:
    if COMPILER is None:
        pytest.skip("needs a C++ compiler")
    got = run(set_middle(generate(5, Settings(**Sjd().settings()), vocabulary=100)))
    assert np.abs(got["measures"][..., 3]).max() < 1e-5
