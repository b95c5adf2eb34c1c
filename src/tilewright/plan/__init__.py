"""Plans a step for devices that are not there: what it needs of their memory, and how fast it could be at most."""

from tilewright.plan.estimate import Estimate as Estimate
from tilewright.plan.estimate import estimate as estimate
from tilewright.plan.place import Place as Place
from tilewright.plan.search import search as search
from tilewright.plan.step import Step as Step
