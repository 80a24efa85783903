"""exp's own tasks, one module each; those of which the kit is made share its module."""

from exp.tasks.attach import Attach
from exp.tasks.doctor import Doctor
from exp.tasks.env import Env
from exp.tasks.estimate import Estimate
from exp.tasks.eval import Eval
from exp.tasks.parity import Parity
from exp.tasks.predict import Predict
from exp.tasks.qualify import Collectives, Operators, Qualify, Speed
from exp.tasks.report import Report
from exp.tasks.track import Track
from exp.tasks.train import Train

__all__ = ["TASKS"]

TASKS = (
    Attach,
    Collectives,
    Doctor,
    Env,
    Estimate,
    Eval,
    Operators,
    Parity,
    Predict,
    Qualify,
    Report,
    Speed,
    Track,
    Train,
)
