"""What a page is made of; `page.py` writes it as HTML.

A page has sections, and a section has parts: `Text`, `Link`, `Facts`, `Table`,
`Findings`, `Chart`, `Timeline`, `Picture`, `Completions`, and `Pair` of others.
Charts that follow each other stand side by side. All texts are plain: nothing
in them is read as HTML.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Text(NamedTuple):
  """A paragraph."""

  text: str
  # 'note' for what is said beside, 'warning' for what is wrong, 'heading' for a
  # line above what follows.
  kind: str = ''


class Link(NamedTuple):
  """A text that leads somewhere; alone it is a paragraph.

  Attributes:
    text: What is read.
    target: A place on this page (`#a`), a file beside it (`claims.json`), a
      place on that (`claims.html#a`), or an address that begins with https://.
  """

  text: str
  target: str


class Facts(NamedTuple):
  """Numbers that matter most, each with what it is."""

  rows: Sequence[tuple[str, str]]


class Table(NamedTuple):
  """A table with a sentence above it.

  Attributes:
    title: What the table shows.
    head: The name of each column; empty for a table without a head.
    rows: Texts and links. Columns that hold numbers alone are set to the right.
    folded: Whether the table is shown only when its title is chosen.
    anchors: A name for each row, as which links find it; empty for none.
  """

  title: str
  head: Sequence[str]
  rows: Sequence[Sequence[str | Link]]
  folded: bool = False
  anchors: Sequence[str] = ()


class Finding(NamedTuple):
  """A statement, and what has come of it.

  Attributes:
    verdict: In a word or some.
    mark: How the verdict is coloured: 'good', 'bad' or 'open'.
    statement: It leads to the numbers.
    note: What else is to be said.
  """

  verdict: str
  mark: str
  statement: Link
  note: str = ''


class Findings(NamedTuple):
  """Statements below each other."""

  rows: Sequence[Finding]


class Curve(NamedTuple):
  """A line of a chart: points, each of which may stand for several values.

  Every array has one entry for each of N points, from left to right; see
  `curves.make_curve`, which makes them.

  Attributes:
    name: In the legend.
    x: f64[N], where the point is drawn.
    since: f64[N], the first x of the values that it stands for.
    until: f64[N], the last one.
    mean: f64[N]; NaN where there is no value.
    low: f64[N], the lower edge of the band; NaN where there is none.
    high: f64[N], the upper edge.
    least: f64[N], the smallest of all values that the point stands for.
    most: f64[N], the largest.
    runs: f64[K,N], the means of each of several runs; [0,N] for a single one.
    band: What the band is, in words; '' if there is none.
    end: How the curve begins and ends; see `curves.Ends`.
  """

  name: str
  x: np.ndarray
  since: np.ndarray
  until: np.ndarray
  mean: np.ndarray
  low: np.ndarray
  high: np.ndarray
  least: np.ndarray
  most: np.ndarray
  runs: np.ndarray
  band: str
  end: 'Ends | None' = None


class Ends(NamedTuple):
  """The means of the first and of the last tenth of each run of a curve."""

  first: float
  last: float
  noise: float  # deviation of single values within these tenths
  half: float  # of the interval of `last` over runs; NaN for a single run


class Chart(NamedTuple):
  """Curves over one axis.

  Attributes:
    title: What is to be seen in it.
    measured: What is measured.
    curves: At least one.
    unit: Of all curves; '%' shows shares in percent.
    key: The name of the metric, as programs know it.
    note: What else must be known.
    x_label: Charts with the same one are read and zoomed together.
    x_range: What the x axis shows at least.
    x_log: Whether the x axis is logarithmic.
    y_log: Whether the y axis is logarithmic, with values above 0.
  """

  title: str
  measured: str
  curves: Sequence[Curve]
  unit: str = ''
  key: str = ''
  note: str = ''
  x_label: str = 'rollout'
  x_range: Sequence[float] = ()
  x_log: bool = False
  y_log: bool = False


class Timeline(NamedTuple):
  """When each of several things happened."""

  title: str
  rows: Sequence[tuple[str, Sequence[float]]]  # what, and where on the axis
  first: float  # where the axis begins
  last: float
  x_label: str = 'rollout'


class Picture(NamedTuple):
  """A drawing that was made elsewhere, for light and for dark pages.

  Attributes:
    title: What is to be seen in it; also read aloud in its place.
    light: A PNG file.
    dark: Another, shown where dark pages are preferred.
    note: What else must be known.
  """

  title: str
  light: bytes
  dark: bytes
  note: str = ''


POLICY, ENVIRONMENT, TEMPLATE = 'policy', 'environment', 'template'


class Token(NamedTuple):
  """A token of a completion, or a message in its place.

  Attributes:
    text: What it adds to the text.
    coefficient: Weight times advantage; None: not measured.
    log_ratio: After the updates, nats; likewise.
    writer: `POLICY`, `ENVIRONMENT` or `TEMPLATE`; '' if all are the policy's.
    before: What begins with it, such as 'turn 2'.
  """

  text: str
  coefficient: float | None = None
  log_ratio: float | None = None
  writer: str = ''
  before: str = ''


class Completion(NamedTuple):
  """A completion: its tokens if they are known, else its text."""

  label: str
  text: str
  reward: float  # NaN if it was not judged
  tokens: Sequence[Token] = ()
  note: str = ''
  facts: Sequence[str] = ()  # behind the reward


class Completions(NamedTuple):
  """Completions of one prompt, below each other or side by side."""

  prompt: str
  answer: str | None
  completions: Sequence[Completion]
  beside: bool = False
  read: Sequence[Token] = ()  # by all of them, in the place of the prompt


class Pair(NamedTuple):
  """Parts beside others where there is room; else above them."""

  first: Sequence['Part']
  second: Sequence['Part']  # neither has `Completions` or a `Pair`


Part = (
  Text
  | Link
  | Facts
  | Table
  | Findings
  | Chart
  | Timeline
  | Picture
  | Completions
  | Pair
)


class Section(NamedTuple):
  """A heading and what stands below it."""

  title: str
  parts: Sequence[Part]
  folded: bool = False


class Page(NamedTuple):
  """A page."""

  title: str
  about: str  # a sentence or two below the title
  sections: Sequence[Section]
