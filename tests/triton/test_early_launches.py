"""What programmatic dependent launches rest on (`_launch.early`), read off the kernels' own code: no GPU shows a race that it
happens to win."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from dspine import kernels_triton

FILES = sorted(Path(next(iter(kernels_triton.__path__))).glob("*.py"))
# lengths, live rows and the m of a commit are read in front of the wait: who writes them lets nobody in before it has ended
READ_EARLY = {"_settle_round_kernel", "_limits_kernel"}


def functions() -> dict[str, ast.FunctionDef]:
    """Every function of the kernels' files that takes OVERLAP, by file and name."""
    found = {}
    for path in FILES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and any(arg.arg == "OVERLAP" for arg in node.args.args):
                found[f"{path.stem}.{node.name}"] = node
    return found


def calls(node: ast.AST, name: str) -> bool:
    return any(isinstance(x, ast.Call) and isinstance(x.func, ast.Name) and x.func.id == name for x in ast.walk(node))


def waits(body: list[ast.stmt], helper: str = "gdc_wait", **known: bool) -> bool:
    """Whether every way through these statements comes to `gdc_wait`, or to a helper that waits. A condition that is not made
    of `known` names may go either way; a loop may not run at all."""
    for statement in body:
        if isinstance(statement, ast.If):
            names = {x.id for x in ast.walk(statement.test) if isinstance(x, ast.Name)}
            ways = [statement.body, statement.orelse]
            if names <= set(known):
                ways = ways[:1] if eval(ast.unparse(statement.test), {}, dict(known)) else ways[1:]
            if all(waits(way, helper, **known) for way in ways):
                return True
        elif not isinstance(statement, ast.For | ast.While) and (calls(statement, "gdc_wait") or calls(statement, helper)):
            return True
    return False


def always(body: list[ast.stmt], helper: str = "gdc_wait") -> bool:
    """`waits` of an early launch under any choice of where it reads ahead."""
    return all(waits(body, helper, OVERLAP=True, AHEAD=ahead) for ahead in (False, True))


@pytest.mark.parametrize("name", [name for name in functions() if name.split(".")[0] != "routed_experts"])
def test_every_program_waits(name):
    assert always(functions()[name].body)


def test_the_experts_programs_wait():
    """Inner and sum at once; outer in each of its branches: as the shared expert, as a pair's first, and as any other."""
    found = functions()
    for name in ("_inner_kernel", "_sum_kernel", "_product"):
        assert always(found[f"routed_experts.{name}"].body)
    outer = found["routed_experts._outer_kernel"].body[-1]
    assert isinstance(outer, ast.If) and always(outer.body, "_product")
    (pairs,) = outer.orelse
    chosen = pairs.body[-1]
    assert isinstance(chosen, ast.If) and always(chosen.body, "_product") and always(chosen.orelse)


def test_numbers_that_are_read_early_are_written_by_launches_that_let_nobody_in():
    kernels = {}
    for path in FILES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name in READ_EARLY:
                kernels[node.name] = node
    assert set(kernels) == READ_EARLY
    assert not any(calls(node, "gdc_launch_dependents") for node in kernels.values())


def test_a_kernel_without_the_choice_lets_nobody_in():
    for path in FILES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and not any(arg.arg == "OVERLAP" for arg in node.args.args):
                assert not calls(node, "gdc_wait") and not calls(node, "gdc_launch_dependents"), node.name


def test_what_the_reader_of_code_sees():
    """A branch without a wait, a wait in a loop, a wait that only some launches have: none of them will do."""

    def read(text: str) -> bool:
        return always(ast.parse(text).body)

    assert read("if OVERLAP:\n    gdc_wait()") and read("if x:\n    gdc_wait()\nelse:\n    gdc_wait()")
    assert read("if OVERLAP and not AHEAD:\n    gdc_wait()\nif AHEAD:\n    gdc_wait()")
    for text in (
        "if x:\n    gdc_wait()",
        "for i in y:\n    gdc_wait()",
        "if AHEAD:\n    gdc_wait()",
        "gdc_launch_dependents()",
    ):
        assert not read(text)
