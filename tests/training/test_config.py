"""The YAML file, its overrides and its errors; schedules at given steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from dspine.common.errors import DSpineError
from dspine_cuda.training.cli import main
from dspine_cuda.training.config import ScheduleSection, load_train_config, parse_train_config
from dspine_cuda.training.schedules import alignment_beta, learning_rate, replacement_probability, warmup_steps
from tests.training.toys import train_settings

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "train_smollm2"


def test_overrides_win_and_numbers_are_numbers(tmp_path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(train_settings(tmp_path)))
    config = load_train_config(path, ["optimizer.learning_rate=2e-4", "schedule.max_steps=7", "model.taps=[0, 2]"])
    assert config.optimizer.learning_rate == 2e-4
    assert config.schedule.max_steps == 7
    assert config.model.taps == (0, 2)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.typo=1", "unknown key run.typo .known: output_dir"),
        ("modle.target=x", "unknown key modle .sections: model, heads, data"),
        ("schedule.max_steps=0", "schedule.max_steps: Input should be greater than or equal to 1 .got 0"),
        ("optimizer.learning_rate=fast", "optimizer.learning_rate"),
        ("model.is_causal=false", "a DSpine drafter is block-causal"),
        ("model.injection=false loss.alignment=cosine", "need a DSpine model with injection"),
        ("optimizer.micro_batches=3", "does not divide into optimizer.micro_batches 3"),
        ("max_steps=3", "expected section.key=value"),
        ("run.device=[", "not valid YAML"),
    ],
)
def test_errors_are_one_line(tmp_path, override: str, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(train_settings(tmp_path)))
    with pytest.raises(DSpineError, match=message) as caught:
        load_train_config(path, override.split())
    assert "\n" not in str(caught.value)


def test_command_prints_the_error_and_exits_with_two(tmp_path, capsys) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(train_settings(tmp_path)))
    assert main(["train", str(path), "data.pth=x"]) == 2
    assert "unknown key data.pth" in capsys.readouterr().err
    assert main(["train", str(tmp_path / "absent.yaml")]) == 2
    path.write_text("model: [unclosed")
    assert main(["train", str(path)]) == 2


def test_without_injection_what_needs_it_is_off(tmp_path) -> None:
    settings = train_settings(tmp_path, model={"injection": False})
    config = parse_train_config(settings)
    assert (config.loss.refinement, config.loss.alignment) == (False, "none")
    with pytest.raises(DSpineError, match="need a DSpine model"):
        parse_train_config(train_settings(tmp_path, model={"method": "dflash"}, loss={"refinement": True}))


@pytest.mark.parametrize("name", ["dspine", "dflash"])
def test_shipped_examples_load(name: str) -> None:
    config = load_train_config(EXAMPLES / f"{name}.yaml", ["data.path=x", "run.output_dir=y"])
    assert config.model.method == name
    twin = load_train_config(EXAMPLES / "dspine.yaml", ["data.path=x", "run.output_dir=y"])
    assert (config.data, config.schedule, config.optimizer) == (twin.data, twin.schedule, twin.optimizer)


def test_going_on_keeps_the_shape_and_bends_the_schedule() -> None:
    first, more = (
        load_train_config(EXAMPLES / f"{n}.yaml", ["data.path=[x,z]", "run.output_dir=y"]) for n in ("dspine", "continue")
    )
    assert more.model.start_from == "auto" and more.data.paths == ("x", "z") and more.data.holdout == first.data.holdout
    kept = ("num_layers", "taps", "mask_token_id", "transfer_rank", "message_size", "top_k", "method")
    assert all(getattr(more.model, name) == getattr(first.model, name) for name in kept)
    assert (first.model.block_size, more.model.block_size) == (8, 16)
    rows = [c.data.rows_per_step * c.data.num_anchors * c.model.block_size for c in (first, more)]
    assert rows[0] <= rows[1] < 1.2 * rows[0] and more.optimizer.learning_rate < first.optimizer.learning_rate
    assert more.schedule.max_steps is None and more.schedule.max_minutes == 8.0
    with pytest.raises(ValueError, match="not fixed yet"):
        _ = more.schedule.steps
    with pytest.raises(DSpineError, match="max_steps is missing .or max_minutes"):
        load_train_config(EXAMPLES / "continue.yaml", ["data.path=x", "run.output_dir=y", "schedule.max_minutes=null"])


def test_schedule_values() -> None:
    schedule = ScheduleSection(max_steps=600)
    assert warmup_steps(schedule) == 24
    assert learning_rate(0, 1.0, schedule) == pytest.approx(1 / 24)
    assert learning_rate(23, 1.0, schedule) == pytest.approx(1.0)
    assert learning_rate(24 + 288, 1.0, schedule) == pytest.approx(0.5)
    assert learning_rate(600, 1.0, schedule) == pytest.approx(0.0, abs=1e-12)
    assert [alignment_beta(step, 0.5, schedule) for step in (0, 12, 24, 599)] == pytest.approx([0.0, 0.25, 0.5, 0.5])
    values = [replacement_probability(step, schedule) for step in (0, 99, 100, 150, 199, 200, 599)]
    assert values == pytest.approx([0.5, 0.5, 0.5, 0.25, 0.005, 0.0, 0.0])
