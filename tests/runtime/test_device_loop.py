"""The GPU loop on a device without a GPU: same pictures as on the host, fixed addresses, order, no waiting."""

from __future__ import annotations

import numpy as np
import pytest

from csd_ops.contract import Settings, cache_names
from csd_ops.errors import InputError
from engines.nvidia.graph import Tail, step_copy
from engines.onnx_runtime import OnnxRuntimeEngine
from runtime import ImageModel
from runtime.bundle import STEP
from runtime.decoder import Decoded, Decoder, Request, Setup
from runtime.device_loop import DEPTH, DeviceLoop
from runtime.host_loop import HostLoop
from tests.csd_ops.host_kernels import COMPILER
from tests.runtime.recording_device import QueuedEngine, RecordingDevice, as_numpy

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
CAPACITY = 384
PROMPTS = ["cat on pink", "heart", "sunflower on blue"]


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory, demo: ImageModel) -> OnnxRuntimeEngine:
    """The step graph up to the logits, on the CPU."""
    import onnx

    folder = tmp_path_factory.mktemp("cut")
    model, _ = step_copy(demo.bundle.path(STEP), capacity=CAPACITY, precision="fp32", tail=Tail.KERNEL, folder=folder)
    onnx.load_external_data_for_model(model, str(demo.bundle.folder))
    onnx.save(model, folder / "cut.onnx")
    return OnnxRuntimeEngine(folder / "cut.onnx", threads=2)


def codes(model: ImageModel) -> np.ndarray:
    return np.zeros((model.bundle.manifest.image_vocabulary, 1), np.float32)


def make_setup(model: ImageModel, preset: str, batch: int, **truncation: float) -> tuple[Setup, list[Request]]:
    chosen = model.preset(preset, **({} if preset == "ar" else {"window": 12}))
    settings: Settings = chosen.settings(
        temperature=1.0, top_k=int(truncation.get("top_k", 0)), top_p=truncation.get("top_p", 1.0)
    )
    requests = [Request(model._encoder.encode(text), seed) for seed, text in enumerate(PROMPTS)]
    longest = max(len(row) for request in requests for row in request.rows)
    return Setup(model.bundle.manifest, settings, chosen.window, 1.5, batch, longest), requests


def on_device(
    setup: Setup, requests: list[Request], engine: OnnxRuntimeEngine, model: ImageModel, **options: bool | int
) -> tuple[list[Decoded], RecordingDevice, DeviceLoop]:
    device = RecordingDevice()
    queued = QueuedEngine(engine, device)
    own_tail = "next_position" in engine.outputs
    loop = DeviceLoop(
        device,
        queued,
        queued,
        setup,
        codes(model),
        capacity=None if own_tail else CAPACITY,
        **options,  # type: ignore[arg-type]
    )
    return Decoder(setup, loop).decode(requests), device, loop


def same(found: list[Decoded], expected: list[Decoded]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.kind, other.kind)
        np.testing.assert_array_equal(one.pass_of, other.pass_of)
        assert one.passes == other.passes and one.seed == other.seed
        np.testing.assert_allclose(one.measures[:, :4], other.measures[:, :4], atol=1e-4)
        np.testing.assert_allclose(one.surprise, other.surprise, atol=1e-3)


@pytest.mark.parametrize(
    ("preset", "batch", "truncation"),
    [("csd", 1, {}), ("csd", 2, {"top_k": 50, "top_p": 0.9}), ("sjd-gumbel", 2, {}), ("gsd", 1, {}), ("jacobi", 3, {})],
)
def test_kernels_after_the_engine_draw_the_pictures_of_the_host(
    demo: ImageModel, cut: OnnxRuntimeEngine, preset: str, batch: int, truncation: dict[str, float]
) -> None:
    setup, requests = make_setup(demo, preset, batch, **truncation)
    found, _, _ = on_device(setup, requests, cut, demo)
    same(found, Decoder(setup, HostLoop(demo.backend.step, setup)).decode(requests))


def test_engine_with_its_own_tail_draws_the_pictures_of_the_host(demo: ImageModel) -> None:
    setup, requests = make_setup(demo, "csd", 2)
    found, _, loop = on_device(setup, requests, demo.backend.step, demo)  # type: ignore[arg-type]
    assert loop.own_tail
    same(found, Decoder(setup, HostLoop(demo.backend.step, setup)).decode(requests))


def test_replay_equals_queueing_every_part(demo: ImageModel, cut: OnnxRuntimeEngine) -> None:
    setup, requests = make_setup(demo, "csd", 2)
    replayed, _, _ = on_device(setup, requests, cut, demo)
    queued, device, _ = on_device(setup, requests, cut, demo, captured=False)
    same(replayed, queued)
    assert "replay" not in device.log


def test_long_prompts_take_several_passes(demo: ImageModel, cut: OnnxRuntimeEngine) -> None:
    setup, requests = make_setup(demo, "csd", 2)
    found, _, loop = on_device(setup, requests, cut, demo, longest_prompt=2)
    host = HostLoop(demo.backend.step, setup)
    same(found, Decoder(setup, host).decode(requests))
    assert loop.passes > host.passes - 1


def test_the_device_never_waits_for_the_host(demo: ImageModel, cut: OnnxRuntimeEngine) -> None:
    """Between two passes nothing is queued but the copy of the positions, and passes are queued ahead."""
    setup, requests = make_setup(demo, "csd", 1)
    _, device, _ = on_device(setup, requests[:1], cut, demo)
    assert device.finishes == 1, "once, before capturing"
    passes = [name for name in device.log if name != "write" and name != "zero"]
    begin = passes.index("replay")
    middle = passes[begin : begin + 2 * 20]
    assert middle == ["replay", "read"] * 20
    assert len(device.left) > 40
    assert min(device.left[:40]) == DEPTH, "where the host waits for a pass, the device has the next ones already"


def test_depth_of_the_queue(demo: ImageModel, cut: OnnxRuntimeEngine) -> None:
    setup, requests = make_setup(demo, "csd", 1)
    device = RecordingDevice()
    queued = QueuedEngine(cut, device)
    loop = DeviceLoop(device, queued, queued, setup, codes(demo), capacity=CAPACITY)
    loop.rest()
    loop.prompts([(group, row[:-1]) for group, row in enumerate(requests[0].rows)])
    loop.begin(0, setup.start(requests[0]))
    told = []
    for _ in range(DEPTH):
        loop.step()
        told += loop.positions()
    assert not told, "nothing is waited for while few passes are queued"
    loop.step()
    (first,) = loop.positions()
    assert first[0] == 1 and first[1][0] >= 1
    assert sum(work.name == "replay" for _, work in device.queue) == DEPTH


def test_addresses_are_fixed_and_caches_are_in_place(demo: ImageModel, cut: OnnxRuntimeEngine) -> None:
    setup, requests = make_setup(demo, "csd", 2)
    _, device, loop = on_device(setup, requests, cut, demo)
    assert len(device.replayed) == 2
    for turn, sequence in enumerate(device.replayed):
        assert [work.name for work in sequence] == ["engine", "csd_verify", "csd_advance", "csd_record"]
        engine, verify, advance, record = (work.addresses for work in sequence)
        for name in cache_names(demo.bundle.manifest.layers):
            assert engine[name] == engine[f"next_{name}"] == loop.cache[name].address
        assert engine["logits"] == verify["logits"]
        assert verify["q"] == advance["q"] and advance["tokens"] == record["tokens"]
        for name in ("ids", "length", "position", "history_probs"):
            read, written = loop.states[turn][name].address, loop.states[1 - turn][name].address
            assert read != written
            assert advance[name] == read and advance[f"next_{name}"] == written
        used = {address for part in (engine, verify, advance, record) for address in part.values()}
        assert used <= device.memory.keys(), "only what was allocated before"


def test_a_cache_in_two_places_is_refused(demo: ImageModel, cut: OnnxRuntimeEngine) -> None:
    from engines.nvidia.engine import check_in_place

    device = RecordingDevice()
    one, other = (device.allocate((1, 4, CAPACITY, 64), "float32") for _ in range(2))
    check_in_place({"key_0": one}, {"next_key_0": one})
    with pytest.raises(InputError, match="expected key_0 and next_key_0 at one address, found two"):
        check_in_place({"key_0": one}, {"next_key_0": other})


def test_too_small_an_engine_is_refused(demo: ImageModel, cut: OnnxRuntimeEngine) -> None:
    setup, _ = make_setup(demo, "csd", 1)
    device = RecordingDevice()
    queued = QueuedEngine(cut, device)
    with pytest.raises(InputError, match=f"expected an engine of capacity {setup.capacity}, found 64"):
        DeviceLoop(device, queued, queued, setup, codes(demo), capacity=64)


def test_parts_of_device_arrays() -> None:
    device = RecordingDevice()
    array = device.allocate((3, 4, 2), "int64")
    device.write(array[2][1], np.array([7, 8]))
    device.finish()
    assert as_numpy(array)[2, 1].tolist() == [7, 8] and as_numpy(array).sum() == 15
    assert array[2][1][0].shape == () and array[2].nbytes == 64
