"""The TensorRT plugins against the validation of the real TensorRT 11 bindings, without TensorRT's libraries.

The bindings import beside TensorRT-RTX's two libraries under TensorRT's names and a stub of the third, so that their
`tensorrt.plugin` checks signatures, registers with a real plugin registry and makes the real plugin class. This proves
the registration and the launch contract: names, order, dtypes, shapes, grid and scalars. It does not prove that an
engine builds or that the kernel runs inside one: that takes a GPU (tests/gpu).
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from csd_ops.kernels import ADVANCE, THREADS, VERIFY, Kernel, compile_kernels
from tests.csd_ops.test_kernels import entries

SIZES = {"B": 2, "W": 5, "V": 7, "R": 4, "C": 3, "T": 17, "N": 1, "G": 2, "E": 8}

SCRIPT = """
import json, sys
import tensorrt_bindings as trt
sys.modules["tensorrt"] = trt
from csd_ops.kernels import VERIFY, ADVANCE, evaluate
from csd_ops.plugin import PLUGINS, register

SIZES = json.loads(sys.argv[1])
register(trt, b"first code")
register(trt, b"ptx")  # for another GPU: the later code counts
import tensorrt.plugin as plugins
from tensorrt.plugin._lib import QDP_REGISTRY
from tensorrt.plugin._tensor import ShapeExpr, ShapeExprs, SymIntExpr, TensorDesc


class Expression(trt.IDimensionExpr):
    # a stand-in for what TensorRT's builder makes: it knows its value
    def is_constant(self):
        return True

    def get_constant_value(self):
        return self.value


def number(value):
    made = Expression.__new__(Expression)
    made.value = value
    return made


class Builder:
    def constant(self, value):
        return number(value)

    def operation(self, kind, a, b):
        assert kind == trt.DimensionOperation.SUM
        return number(a.value + b.value)


SymIntExpr._exprBuilder = Builder()
dtypes = {"float32": trt.float32, "int64": trt.int64, "bool": trt.bool}
told = {"creators": sorted(c.name for c in trt.get_plugin_registry().all_creators if c.plugin_namespace == "csd")}
for name, kernel in PLUGINS.items():
    definition = QDP_REGISTRY[name]
    shapes = kernel.shapes(SIZES)
    tensors = []
    for tensor, (dtype, _) in kernel.inputs.items():
        expressions = ShapeExprs.from_tuple(tuple(ShapeExpr(number(size)) for size in shapes[tensor]))
        tensors.append(TensorDesc(expressions, dtypes[dtype]))
    outputs = definition.register_func(*tensors)
    entry, code, launch, scalars = definition.aot_impl_func(*tensors, outputs, 0)
    assert isinstance(launch, plugins.KernelLaunchParams)
    assert all(isinstance(scalar, plugins.SymInt32) for scalar in scalars)
    value = lambda expression: expression._expr.value
    told[name] = {
        "inputs": definition.input_tensor_names,
        "outputs": [[str(o.dtype), [value(size) for size in o.shape_expr]] for o in outputs],
        "entry": entry,
        "code": code.decode(),
        "grid": [value(launch.grid_x), value(launch.grid_y), value(launch.grid_z)],
        "block": [value(launch.block_x), value(launch.block_y), value(launch.block_z)],
        "shared": value(launch.shared_mem),
        "scalars": [value(scalar) for scalar in scalars],
    }
    SymIntExpr._exprBuilder = None  # the creator's own class, as the parser asks for it
    creator = trt.get_plugin_registry().get_creator(name.split("::")[1], "1", "csd")
    request = trt.QuickPluginCreationRequest.PREFER_AOT
    fields, phase = trt.PluginFieldCollection([]), trt.TensorRTPhase.BUILD
    plugin = creator.create_plugin(name.split("::")[1], "csd", fields, phase, request)
    given = [dtypes[d] for d, _ in kernel.inputs.values()]
    kinds = plugin.get_output_data_types(given, [len(t.shape_expr) for t in tensors])
    told[name]["class"] = type(plugin).__name__
    told[name]["types"] = [str(kind) for kind in kinds]
    SymIntExpr._exprBuilder = Builder()
print(json.dumps(told))
"""

WRONG = """
import sys
import tensorrt_bindings as trt
sys.modules["tensorrt"] = trt
import tensorrt.plugin as plugins
from csd_ops import plugin
from csd_ops.kernels import VERIFY
describe = plugin._describe(trt, plugins, VERIFY)
plugins.register("csd::Verify")(describe)
implement = plugin._implement(plugins, VERIFY, b"")
names, returned = list(VERIFY.inputs)[::-1], implement.__signature__.return_annotation
plugin._signature(implement, names, plugins.TensorDesc, ["outputs", "tactic"], returned)
plugins.aot_impl("csd::Verify")(implement)
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Where the bindings find their libraries."""
    from tests.csd_ops.host_kernels import COMPILER

    found = importlib.util.find_spec("tensorrt_rtx_libs")
    if importlib.util.find_spec("tensorrt_bindings") is None or found is None or COMPILER is None:
        pytest.skip("needs the tensorrt-cu13-bindings, tensorrt-rtx and a C++ compiler")
    libraries = Path(next(iter(found.submodule_search_locations or [])))
    folder = tmp_path_factory.mktemp("libraries")
    (folder / "libnvinfer.so.11").symlink_to(libraries / "libtensorrt_rtx.so.1")
    (folder / "libnvonnxparser.so.11").symlink_to(libraries / "libtensorrt_onnxparser_rtx.so.1")
    source = folder / "stub.cpp"
    source.write_text('extern "C" int initLibNvInferPlugins(void *, const char *) { return 1; }\n')
    subprocess.run([COMPILER, "-shared", "-fPIC", source, "-o", folder / "libnvinfer_plugin.so.11"], check=True)
    return os.environ | {"LD_LIBRARY_PATH": str(folder)}


@pytest.fixture(scope="module")
def told(environment: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(SIZES)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_both_are_in_the_plugin_registry(told: dict[str, Any]) -> None:
    assert told["creators"] == ["Advance", "Verify"]


@pytest.mark.parametrize(("name", "kernel"), [("csd::Verify", VERIFY), ("csd::Advance", ADVANCE)])
def test_launch_contract(told: dict[str, Any], name: str, kernel: Kernel) -> None:
    plugin = told[name]
    kinds = {"float32": "DataType.FLOAT", "int64": "DataType.INT64", "bool": "DataType.BOOL"}
    shapes = kernel.shapes(SIZES)
    assert plugin["inputs"] == list(kernel.inputs)
    assert plugin["outputs"] == [[kinds[dtype], list(shapes[output])] for output, (dtype, _) in kernel.outputs.items()]
    assert plugin["types"] == [kinds[dtype] for dtype, _ in kernel.outputs.values()]
    assert plugin["class"] == "_TemplateAOTPlugin"
    assert plugin["entry"] == kernel.name and plugin["code"] == "ptx"
    assert plugin["grid"] == list(kernel.launch_grid(SIZES))
    assert plugin["block"] == [THREADS, 1, 1] and plugin["shared"] == 0
    assert plugin["scalars"] == kernel.scalar_values(SIZES)


@pytest.mark.parametrize(("name", "kernel"), [("csd::Verify", VERIFY), ("csd::Advance", ADVANCE)])
def test_arguments_fit_the_ptx(told: dict[str, Any], name: str, kernel: Kernel) -> None:
    """TensorRT passes inputs, scalars, outputs: as many, and as wide, as the entry has parameters."""
    pytest.importorskip("cuda.bindings.nvrtc")
    plugin = told[name]
    passed = ["64"] * len(plugin["inputs"]) + ["32"] * len(plugin["scalars"]) + ["64"] * len(plugin["outputs"])
    parameters = entries(compile_kernels(90)[0].decode())[plugin["entry"]]
    assert [kind[1:] for kind in parameters] == passed


def test_bindings_refuse_another_order(environment: dict[str, str]) -> None:
    done = subprocess.run([sys.executable, "-c", WRONG], env=environment, capture_output=True, text=True)
    assert done.returncode and "does not match the expected input arg schema" in done.stderr


def test_names_of_the_nodes_are_those_of_the_plugins() -> None:
    """The parser looks a node up by domain and type, with these inputs and outputs in this order."""
    import onnx

    from csd_ops.plugin import PLUGINS
    from runtime.model import DEMO

    graph = onnx.load(DEMO / "step.onnx", load_external_data=False).graph
    nodes = {f"{node.domain}::{node.op_type}": node for node in graph.node if node.domain}
    assert nodes.keys() == PLUGINS.keys()
    for name, kernel in PLUGINS.items():
        assert list(nodes[name].input) == list(kernel.inputs)
        assert list(nodes[name].output) == list(kernel.outputs)


def test_tensorrt_rtx_has_no_plugins() -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    from csd_ops.errors import MachineError
    from csd_ops.plugin import register

    with pytest.raises(MachineError, match="expected a TensorRT with ahead-of-time Python plugins"):
        register(trt, b"")
