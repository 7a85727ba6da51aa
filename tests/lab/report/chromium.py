"""A headless Chromium, spoken to through pipes: what a page does in a browser.

Debian's package `chromium` is enough. There is no network, and none is needed.
"""

import base64
import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import tempfile
import time

NAMES = 'chromium', 'chromium-browser', 'google-chrome', 'chrome'
_LIMIT_SECS = 60


def find():
  """The path of a Chromium, or None."""
  return next(filter(None, map(shutil.which, NAMES)), None)


class Tab:
  """One page. `errors` has what its console and the browser complained of."""

  def __init__(self, into, out):
    self._into, self._out, self._number = into, out, 0
    self._left, self.errors, self.requests, self._session = b'', [], [], None
    target = self._call('Target.createTarget', url='about:blank')['targetId']
    found = self._call('Target.attachToTarget', targetId=target, flatten=True)
    self._session = found['sessionId']
    for domain in ('Page', 'Runtime', 'Log', 'Network'):
      self._call(f'{domain}.enable')

  def open(self, path, width=1200, height=900, dark=False, still=False):
    """Shows a file, and waits until it is loaded."""
    self._call(
      'Emulation.setDeviceMetricsOverride',
      width=width, height=height, deviceScaleFactor=1, mobile=False,
    )  # fmt: skip
    features = {
      'prefers-color-scheme': 'dark' if dark else 'light',
      'prefers-reduced-motion': 'reduce' if still else 'no-preference',
    }
    self._call(
      'Emulation.setEmulatedMedia',
      features=[{'name': k, 'value': v} for k, v in features.items()],
    )
    self._call('Page.navigate', url=pathlib.Path(path).absolute().as_uri())
    self.until("document.readyState === 'complete'")
    self.settle()

  def until(self, expression):
    """Waits until an expression of JavaScript is true, but not for ever."""
    end = time.monotonic() + _LIMIT_SECS
    while not self(expression) and time.monotonic() < end:
      time.sleep(0.05)

  def settle(self):
    """Waits until the page is drawn, and its observers have been told."""
    self('new Promise(r => requestAnimationFrame(() => setTimeout(r, 50)))')

  def __call__(self, expression):
    """What an expression of JavaScript is in the page."""
    found = self._call(
      'Runtime.evaluate',
      expression=expression, returnByValue=True, awaitPromise=True,
    )  # fmt: skip
    assert 'exceptionDetails' not in found, found
    return found['result'].get('value')

  def press(self, key):
    """A key, by its name in JavaScript."""
    text = {'text': key} if len(key) == 1 else {}
    for kind in ('keyDown', 'keyUp'):
      self._call('Input.dispatchKeyEvent', type=kind, key=key, **text)
      text = {}

  def mouse(self, kind, x, y, **more):
    """'mouseMoved', 'mousePressed' or 'mouseReleased'."""
    self._call('Input.dispatchMouseEvent', type=kind, x=x, y=y, **more)

  def picture(self, path, whole=False):
    """What is seen, as a PNG; or all of the page."""
    more = {}
    if whole:
      size = self._call('Page.getLayoutMetrics')['cssContentSize']
      size['height'] = min(size['height'], 16000)
      more = {'clip': {**size, 'scale': 1}, 'captureBeyondViewport': True}
    found = self._call('Page.captureScreenshot', format='png', **more)
    pathlib.Path(path).write_bytes(base64.b64decode(found['data']))

  def _call(self, method, **params):
    self._number += 1
    message = {'id': self._number, 'method': method, 'params': params}
    if self._session:
      message['sessionId'] = self._session
    os.write(self._into, json.dumps(message).encode() + b'\0')
    while True:
      answer = self._read()
      if answer.get('id') == self._number:
        assert 'error' not in answer, answer
        return answer['result']
      self._note(answer)

  def _read(self):
    while b'\0' not in self._left:
      more = os.read(self._out, 1 << 20)
      assert more, 'Chromium has ended'
      self._left += more
    line, _, self._left = self._left.partition(b'\0')
    return json.loads(line)

  def _note(self, event):
    params = event.get('params', {})
    if event['method'] == 'Runtime.exceptionThrown':
      self.errors.append(params['exceptionDetails'])
    if event['method'] == 'Log.entryAdded':
      self.errors.append(params['entry'])
    called = event['method'] == 'Runtime.consoleAPICalled'
    if called and params['type'] in ('error', 'warning', 'assert'):
      self.errors.append(params)
    if event['method'] == 'Network.requestWillBeSent':
      self.requests.append(params['request']['url'])


@contextlib.contextmanager
def started():
  """A `Tab` of a Chromium that ends with the context."""
  to_child, into = os.pipe()
  out, from_child = os.pipe()

  with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
    process = subprocess.Popen(
      [
        # Chromium reads file 3 and writes file 4.
        'bash', '-c', f'exec "$0" "$@" 3<&{to_child} 4>&{from_child}',
        find(), '--headless', '--no-sandbox', '--disable-gpu',
        '--disable-quic', '--no-first-run', '--disable-sync',
        '--disable-background-networking', '--disable-component-update',
        '--disable-dev-shm-usage', '--hide-scrollbars',
        '--remote-debugging-pipe', f'--user-data-dir={profile}',
      ],
      pass_fds=(to_child, from_child),
      stdin=subprocess.DEVNULL,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(to_child)
    os.close(from_child)
    try:
      yield Tab(into, out)
    finally:
      os.close(into)
      os.close(out)
      process.terminate()
      process.wait()
