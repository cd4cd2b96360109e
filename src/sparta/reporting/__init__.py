"""Reports for people: the headline, a short table for the terminal, and a page that explains itself.

Everything here is made from the plain values of ``Report.to_dict()`` and measures nothing, so a report that was read
from a file looks like one that was just made.
"""

from sparta.reporting.page import page
from sparta.reporting.text import headline, short

__all__ = ["headline", "page", "short"]
