"""In: a study file: base config, axes, kind, baseline. Out: its points run or collected, their table, fits and words.
Does not draw and makes no page (report/ does), and never imports train: each point is a run of its own."""

from codescent.study.opened import open_study as open_study
from codescent.study.result import Fit as Fit
from codescent.study.result import Group as Group
from codescent.study.result import Kind as Kind
from codescent.study.result import Point as Point
from codescent.study.result import PointQuantity as PointQuantity
from codescent.study.result import PointState as PointState
from codescent.study.result import Study as Study
