"""In: pushes, pulls, deaths and arrival times, in the order in which they happen. Out: the decisions of a parameter
server and of its coordinator. Does no input or output, reads no clock, and needs the standard library alone."""

from codescent.servers.arrivals import Arrivals
from codescent.servers.decided import Decided
from codescent.servers.ledger import Decision, Grant, Ledger, Verdict
from codescent.servers.portions import Portion, Portions
from codescent.servers.speeds import Speeds

__all__ = ["Arrivals", "Decided", "Decision", "Grant", "Ledger", "Portion", "Portions", "Speeds", "Verdict"]
