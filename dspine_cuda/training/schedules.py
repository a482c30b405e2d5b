"""What moves with the global step: learning rate, beta of the alignment loss, the correct-predecessor curriculum.

Pure functions of (step, config): a resumed run is on schedule by construction. Source: `algorithms` 1, Training.
"""

from __future__ import annotations

import math

from dspine_cuda.training.config import ScheduleSection


def warmup_steps(schedule: ScheduleSection) -> int:
    """Length of the learning rate's warm-up, at least one step."""
    return max(1, round(schedule.warmup_ratio * schedule.steps))


def learning_rate(step: int, peak: float, schedule: ScheduleSection) -> float:
    """Linear from peak/W to peak over the W warm-up steps, then a cosine that reaches zero at `max_steps`."""
    warm = warmup_steps(schedule)
    if step < warm:
        return peak * (step + 1) / warm
    progress = (step - warm) / max(1, schedule.steps - warm)
    return peak * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))


def alignment_beta(step: int, final: float, schedule: ScheduleSection) -> float:
    """beta_t: 0 at step 0, linear to `final`."""
    return final * min(1.0, step / (schedule.beta_warmup_steps or warmup_steps(schedule)))


def base_share(step: int, end_ratio: float, schedule: ScheduleSection) -> float:
    """Domino: share of the uncorrected output in the loss, 1 at step 0, linear to 0 at `end_ratio` of the run."""
    return max(0.0, 1.0 - step / (end_ratio * schedule.steps))


def replacement_probability(step: int, schedule: ScheduleSection) -> float:
    """Bernoulli p of the correct-predecessor curriculum: held, then linear to 0."""
    ratio = step / schedule.steps
    hold, end = schedule.replacement_hold_ratio, schedule.replacement_end_ratio
    if ratio < hold:
        return schedule.replacement_probability
    if ratio >= end:
        return 0.0
    return schedule.replacement_probability * (end - ratio) / (end - hold)
