"""What a plan says of the template's imports."""

from __future__ import annotations

import dataclasses

from nbaccel.base.units import count_noun
from nbaccel.config.capabilities import engine_row
from nbaccel.plan import Choice, Plan
from nbaccel.workers.template_learning import TemplateLearner

__all__ = ["left_out_text", "uses_template", "with_imports"]


def uses_template(plan: Plan) -> bool:
    """Whether workers are forked from the template process of this very machine.

    Args:
        plan: What was planned.
    """
    return plan.start_method == "template" and not engine_row(plan.engine).starts_agents


def with_imports(plan: Plan, learner: TemplateLearner) -> Plan:
    """The plan with what each worker imports itself, though the notebook has it.

    Args:
        plan: What was planned.
        learner: What the template has imported.
    """
    if not learner.left_out:
        return plan
    choice = Choice(
        "template_imports",
        count_noun(len(learner.learned_packages()), "package"),
        "; ".join(
            f"{package} is left out: {why}" for package, why in sorted(learner.left_out.items())
        ),
    )
    return dataclasses.replace(plan, choices=(*plan.choices, choice))


def left_out_text(learner: TemplateLearner) -> str:
    """A sentence for each package that every worker imports itself.

    Args:
        learner: What the template has imported.
    """
    return " ".join(
        f"Each worker imports {package} itself, because {why}."
        for package, why in sorted(learner.left_out.items())
    )
