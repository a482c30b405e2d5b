"""The generated text is MLX's own, character by character: MLX shows it when a function is exported."""

from __future__ import annotations

import pytest

from tests.metal.signature import ATTRIBUTES, Operand, kernel_text

mx = pytest.importorskip("mlx.core", reason="MLX is not installed")

BODY = "  uint i = thread_position_in_grid.x;\n  o[i] = (T)a[i];\n"
DTYPES = ["bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32"]


def mlx_text(name, source, header, inputs, outputs, template, atomic_outputs):
    def function(*arrays):
        kernel = mx.fast.metal_kernel(
            name=name,
            input_names=[o.name for o in inputs],
            output_names=[o.name for o in outputs],
            source=source,
            header=header,
            atomic_outputs=atomic_outputs,
        )
        return tuple(
            kernel(
                inputs=list(arrays),
                template=[(n, v if isinstance(v, int) else _dtype(v)) for n, v in template] or None,
                grid=(4, 1, 1),
                threadgroup=(4, 1, 1),
                output_shapes=[o.shape for o in outputs],
                output_dtypes=[_dtype(o.dtype) for o in outputs],
            )
        )

    seen = []
    mx.export_function(seen.append, function, *[mx.zeros(o.shape, dtype=_dtype(o.dtype)) for o in inputs])
    texts = [entry["arguments"][:2] for entry in seen if entry.get("name") == "CustomKernel"]
    assert len(texts) == 1, "MLX's export has another form now"
    return texts[0]


def _dtype(name):
    return mx.bool_ if name == "bool" else getattr(mx, name)


def check(name="k", source=BODY, header="", inputs=(), outputs=(), template=(), atomic_outputs=False):
    expected_name, expected = mlx_text(name, source, header, inputs, outputs, template, atomic_outputs)
    kernel = kernel_text(name, source, header, inputs, outputs, template, atomic_outputs)
    assert kernel.text + kernel.instantiation == expected
    assert kernel.function == expected_name


A = Operand("a", "float32", (4, 3))
OUT = Operand("o", "float32", (4,))


def test_plain():
    check(inputs=[A], outputs=[OUT])


def test_header_and_template():
    check(header="// above\n", inputs=[A], outputs=[OUT], template=[("T", "bfloat16"), ("D", 128), ("F", True), ("N", -3)])
    check(inputs=[A], outputs=[OUT], template=[("D", 0)])
    check(inputs=[A], outputs=[OUT], template=[("F", False), ("T", "float16")])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype):
    check(inputs=[Operand("a", dtype, (9,))], outputs=[Operand("o", dtype, (2, 2))], template=[("T", dtype)])


@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (8,), (2, 4), (7, 1), (2, 0)])
def test_address_space_by_size(shape):
    check(inputs=[Operand("a", "int32", shape), A], outputs=[OUT])


@pytest.mark.parametrize("part", ["a_shape", "a_strides", "a_ndim", "a_shape[0] + a_ndim + a_strides"])
@pytest.mark.parametrize("shape", [(), (2,), (3, 5)])
def test_shape_arguments_only_when_used(part, shape):
    check(source=f"  int i = {part};\n", inputs=[Operand("a", "float16", shape), Operand("b", "float32", ())], outputs=[OUT])


@pytest.mark.parametrize("attribute", [*ATTRIBUTES, " ".join(ATTRIBUTES)])
def test_attributes(attribute):
    check(source=f"  // {attribute}\n", inputs=[A], outputs=[OUT])


def test_atomic_outputs():
    check(inputs=[A], outputs=[OUT, Operand("p", "uint32", (1,))], atomic_outputs=True, template=[("T", "float32")])


def test_body_spelling():
    check(name="my_kernel_2", source="", inputs=[A], outputs=[OUT])
    check(source="\n\n    {  }\n\n", inputs=[A], outputs=[OUT], template=[("a_b", 3)])
