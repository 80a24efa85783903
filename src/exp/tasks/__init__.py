"""exp's own tasks, one module each."""

from exp.tasks.attach import Attach
from exp.tasks.doctor import Doctor
from exp.tasks.env import Env
from exp.tasks.eval import Eval
from exp.tasks.parity import Parity
from exp.tasks.predict import Predict
from exp.tasks.report import Report
from exp.tasks.train import Train

__all__ = ["TASKS"]

TASKS = (Attach, Doctor, Env, Eval, Parity, Predict, Report, Train)
