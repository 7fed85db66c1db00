"""Questions about published clusters, and where their figures are from."""

from __future__ import annotations

import msgspec

from everstep.forecast.question import ForecastQuestion


class Preset(msgspec.Struct, frozen=True):
    question: ForecastQuestion
    about: str
    source: str


_LLAMA_HOSTS, _LLAMA_DAYS, _LLAMA_INTERRUPTIONS = 2048, 54.0, 419

PRESETS = {
    "llama3-405b": Preset(
        ForecastQuestion(
            slices=_LLAMA_HOSTS,
            spares=16,
            days=_LLAMA_DAYS,
            step_s=10.0,
            checkpoint_every_s=600.0,
            checkpoint_cost_s=5.0,
            mtbf_h=_LLAMA_HOSTS * _LLAMA_DAYS * 24 / _LLAMA_INTERRUPTIONS,
            host_share=0.78,
            repair_h=24.0,
        ),
        "16,384 GPUs in 2,048 hosts, 54 days, 419 unexpected interruptions, 78 % of them hardware",
        "The Llama 3 Herd of Models, arXiv:2407.21783, section 3.3.4; spares, repair, step and "
        "checkpoint times are assumptions",
    ),
    "bamboo-p3": Preset(
        ForecastQuestion(
            slices=32,
            min_slices=8,
            days=40_920 / 86_400,
            step_s=1.0,
            checkpoint_every_s=300.0,
            checkpoint_cost_s=2.0,
            mtbf_h=None,
            notice_s=120.0,
            trace="bamboo-ec2-p3",
        ),
        "up to 32 spot instances (EC2 p3) that come and go 344 times in 11.4 hours",
        "Bamboo (NSDI 2023), its EC2 p3 trace, MIT licence, shipped with Everstep; EC2 gives 120 s notice; "
        "step and checkpoint times are assumptions",
    ),
}
