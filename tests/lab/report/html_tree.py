"""HTML as a tree that is checked while it is read: tags must close in order."""

import html.parser

VOID = {'meta', 'input', 'br', 'img', 'link', 'hr', 'source'}
_SHAPES = {'path', 'rect'}  # of SVG, which close themselves


class Tree(html.parser.HTMLParser):
  """All elements of a text: (tag, attributes, text directly in it)."""

  def __init__(self, text):
    super().__init__()
    self.elements, self._open, self._texts = [], [], []
    self.feed(text)
    self.close()
    assert not self._open, f'never closed: {self._open}'

  def handle_starttag(self, tag, attributes):
    names = [name for name, _ in attributes]
    assert len({*names}) == len(names), (tag, names)
    element = [tag, dict(attributes), '']
    self.elements.append(element)
    if tag not in VOID:
      self._open.append(element)

  def handle_startendtag(self, tag, attributes):
    assert tag in _SHAPES, tag
    self.elements.append([tag, dict(attributes), ''])

  def handle_endtag(self, tag):
    assert self._open and self._open[-1][0] == tag, (tag, self._open[-3:])
    self._open.pop()

  def handle_data(self, data):
    if self._open:
      self._open[-1][2] += data

  def of(self, tag, **attributes):
    """The elements with this tag whose attributes have these values."""
    return [
      element
      for element in self.elements
      if element[0] == tag
      and all(element[1].get(k) == v for k, v in attributes.items())
    ]
