"""A stand-in for the Hugging Face Hub on loopback.

It answers as the real one does where `huggingface_hub` looks: large files are
sent from another host, to which it redirects; a repository that is private and
one that is not there look alike without a token; errors have their codes in
headers. What goes wrong is told to it: `Faults`.
"""

import base64
import collections
from collections.abc import Iterator
import contextlib
import dataclasses
import functools
import hashlib
import http.server
import json
import pathlib
import threading
from typing import Any
import urllib.parse

import pytest

from grpo_jax.data.hub import _repository

TOKEN = 'hf_stand_in'
CONVERTED = 'refs/convert/parquet'
LARGE = ('.safetensors', '.parquet', '.gguf')


@dataclasses.dataclass
class Repository:
  """Commits of files, and the branches that point at them."""

  commits: dict[str, dict[str, bytes]] = dataclasses.field(default_factory=dict)
  branches: dict[str, str] = dataclasses.field(default_factory=dict)
  card: dict[str, Any] = dataclasses.field(default_factory=dict)
  private: bool = False
  gated: bool = False

  def commit(self, files: dict[str, bytes], branch: str = 'main') -> str:
    """Adds a commit with these files, and moves a branch to it."""
    digest = hashlib.sha1()
    for path, contents in sorted(files.items()):
      digest.update(path.encode() + b'\0' + contents)
    digest.update(branch.encode())
    sha = digest.hexdigest()
    self.commits[sha] = dict(files)
    self.branches[branch] = sha
    _repository.find.cache_clear()  # a process sees one commit of a branch
    return sha


@dataclasses.dataclass
class Faults:
  """What goes wrong, how often or with which file."""

  api: list[int] = dataclasses.field(default_factory=list)  # next answers
  files: list[int] = dataclasses.field(default_factory=list)
  cut: dict[str, int] = dataclasses.field(default_factory=dict)  # after bytes
  wrong: collections.Counter[str] = dataclasses.field(
    default_factory=collections.Counter
  )  # how often a file comes with another first byte


class Hub:
  """The stand-in; `models` and `datasets` hold what it has.

  Attributes:
    asked: 'METHOD path' of each request, in their order.
  """

  def __init__(self):
    self.models: dict[str, Repository] = collections.defaultdict(Repository)
    self.datasets: dict[str, Repository] = collections.defaultdict(Repository)
    self.stored: dict[str, bytes] = {}  # large files, by their SHA-256
    self.faults = Faults()
    self.asked: list[str] = []
    self.role = 'write'  # of the token
    handler = type('Handler', (_Handler,), {'hub': self})
    self._server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler)
    self._server.daemon_threads = True
    serve = functools.partial(self._server.serve_forever, 0.01)
    threading.Thread(target=serve, daemon=True).start()

  @property
  def port(self) -> int:
    return self._server.server_address[1]

  @property
  def endpoint(self) -> str:
    return f'http://127.0.0.1:{self.port}'

  def close(self) -> None:
    """Nobody answers any more."""
    self._server.shutdown()
    self._server.server_close()


@contextlib.contextmanager
def connected(
  monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> Iterator[Hub]:
  """A stand-in that this process asks, with empty caches and no token."""
  from huggingface_hub import constants

  hub = Hub()
  monkeypatch.setattr(constants, 'ENDPOINT', hub.endpoint)
  template = hub.endpoint + '/{repo_id}/resolve/{revision}/{filename}'
  monkeypatch.setattr(constants, 'HUGGINGFACE_CO_URL_TEMPLATE', template)
  monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(tmp_path / 'hf'))
  monkeypatch.setattr(constants, 'HF_TOKEN_PATH', str(tmp_path / 'token'))
  monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', False)
  monkeypatch.setattr(constants, 'HF_HUB_DISABLE_XET', True)
  monkeypatch.delenv('HF_TOKEN', raising=False)
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  _repository.find.cache_clear()
  try:
    yield hub
  finally:
    hub.close()
    _repository.find.cache_clear()


def go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
  """As a new process with HF_HUB_OFFLINE=1."""
  from huggingface_hub import constants

  monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
  _repository.find.cache_clear()


def environment(hub: Hub, tmp_path: pathlib.Path) -> dict[str, str]:
  """What a process of its own needs to ask the stand-in."""
  return {
    'HF_ENDPOINT': hub.endpoint,
    'HF_HOME': str(tmp_path / 'hf_home'),
    'HF_HUB_OFFLINE': '0',
    'HF_HUB_DISABLE_XET': '1',
    'HF_TOKEN': TOKEN,
    'XDG_CACHE_HOME': str(tmp_path / 'cache'),
  }


class _Handler(http.server.BaseHTTPRequestHandler):
  protocol_version = 'HTTP/1.1'
  hub: Hub

  def log_message(self, *_: Any) -> None:
    pass

  def do_HEAD(self) -> None:
    self.do_GET()

  def do_GET(self) -> None:
    path = urllib.parse.urlsplit(self.path).path
    parts = [urllib.parse.unquote(one) for one in path.strip('/').split('/')]
    self.hub.asked.append(f'{self.command} {urllib.parse.unquote(path)}')
    if parts[0] == 'cdn':
      return self._bytes(parts[1], self.hub.stored[parts[1]], parts[2])
    if parts[:2] == ['api', 'whoami-v2']:
      return self._json(
        {
          'type': 'user',
          'name': 'me',
          'orgs': [],
          'auth': {'accessToken': {'role': self.hub.role}},
        }
        if self._is_signed()
        else {'error': 'who?'},
        200 if self._is_signed() else 401,
      )
    if parts[0] == 'api':
      if self.hub.faults.api:
        return self._fault(self.hub.faults.api)
      if parts[1] not in ('models', 'datasets'):
        return self._error(404, 'EntryNotFound', 'Not here')
      return self._info(parts[1], '/'.join(parts[2:4]), parts[4:])
    if self.hub.faults.files:
      return self._fault(self.hub.faults.files)
    kind = 'models'
    if parts[0] == 'datasets':
      kind, parts = parts[0], parts[1:]
    return self._file(kind, '/'.join(parts[:2]), parts[3], '/'.join(parts[4:]))

  def do_POST(self) -> None:
    path = urllib.parse.urlsplit(self.path).path
    self.hub.asked.append(f'{self.command} {path}')
    body = self._body()
    if self.hub.faults.api:
      return self._fault(self.hub.faults.api)
    if not self._is_signed():
      return self._error(401, 'RepoNotFound', 'Repository not found')
    if path == '/api/validate-yaml':
      return self._json({'errors': [], 'warnings': []})
    if path == '/api/repos/create':
      return self._create(json.loads(body))
    if '/preupload/' in path:
      files = [
        {
          'path': one['path'],
          'uploadMode': 'lfs' if one['path'].endswith(LARGE) else 'regular',
          'shouldIgnore': False,
          'oid': None,
        }
        for one in json.loads(body)['files']
      ]
      return self._json({'files': files})
    if path.endswith('.git/info/lfs/objects/batch'):
      objects = [
        {
          **one,
          'actions': {
            'upload': {'href': f'{self.hub.endpoint}/put/{one["oid"]}'}
          },
        }
        for one in json.loads(body)['objects']
      ]
      return self._json({'transfer': 'basic', 'objects': objects})
    if '/commit/' in path:
      return self._commit('/'.join(path.split('/')[3:5]), body)
    return self._error(404, 'EntryNotFound', path)

  def do_PUT(self) -> None:
    self.hub.asked.append(f'{self.command} {self.path}')
    self.hub.stored[self.path.rpartition('/')[2]] = self._body()
    self._say(200)

  def _create(self, asked: dict[str, Any]) -> None:
    name = f'{asked.get("organization") or "me"}/{asked["name"]}'
    if name in self.hub.models:
      said = {'error': 'You already created this model repo'}
      return self._json({**said, 'url': f'{self.hub.endpoint}/{name}'}, 409)
    one = self.hub.models[name]
    one.private = bool(
      asked.get('private') or asked.get('visibility') == 'private'
    )
    one.commit({'.gitattributes': b''})
    return self._json({'url': f'{self.hub.endpoint}/{name}', 'name': name})

  def _commit(self, name: str, body: bytes) -> None:
    one = self.hub.models[name]
    files = dict(one.commits[one.branches['main']])
    for line in body.splitlines():
      entry = json.loads(line)
      value = entry['value']
      if entry['key'] == 'file':
        files[value['path']] = base64.b64decode(value['content'])
      if entry['key'] == 'lfsFile':
        files[value['path']] = self.hub.stored[value['oid']]
      if entry['key'] == 'deletedFile':
        files.pop(value['path'], None)
    sha = one.commit(files)
    url = f'{self.hub.endpoint}/{name}/commit/{sha}'
    self._json({'success': True, 'commitOid': sha, 'commitUrl': url})

  def _info(self, kind: str, name: str, rest: list[str]) -> None:
    one = self._repository(kind, name)
    if one is None:
      return
    at = '/'.join(rest[1:2]) if rest[:1] in (['revision'], ['tree']) else 'main'
    sha = one.branches.get(at, at)
    if sha not in one.commits:
      return self._error(404, 'RevisionNotFound', f'Invalid rev id: {at}')
    if rest[:1] == ['tree']:
      return self._json(
        [
          {
            'type': 'file',
            'oid': _git_sha(contents),
            'size': len(contents),
            'path': path,
          }
          for path, contents in sorted(one.commits[sha].items())
        ]
      )
    self._json(
      {
        '_id': '0',
        'id': name,
        'modelId': name,
        'sha': sha,
        'private': one.private,
        'gated': 'auto' if one.gated else False,
        'tags': [],
        'downloads': 0,
        'cardData': one.card,
        'siblings': [
          _described(path, contents)
          for path, contents in sorted(one.commits[sha].items())
        ],
      }
    )

  def _file(self, kind: str, name: str, at: str, path: str) -> None:
    one = self._repository(kind, name)
    if one is None:
      return
    sha = one.branches.get(at, at)
    if sha not in one.commits:
      return self._error(404, 'RevisionNotFound', f'Invalid rev id: {at}')
    if path not in one.commits[sha]:
      return self._error(404, 'EntryNotFound', 'Entry not found')
    contents = one.commits[sha][path]
    if not path.endswith(LARGE):
      etag = _git_sha(contents)
      return self._say(200, contents, X_Repo_Commit=sha, ETag=f'"{etag}"')
    digest = hashlib.sha256(contents).hexdigest()
    self.hub.stored[digest] = contents
    last = path.rpartition('/')[2]
    self._say(  # another host, as the real one does
      302,
      Location=f'http://localhost:{self.hub.port}/cdn/{digest}/{last}',
      X_Repo_Commit=sha,
      X_Linked_Size=len(contents),
      X_Linked_ETag=f'"{digest}"',
      ETag='"storage"',
    )

  def _bytes(self, digest: str, contents: bytes, name: str) -> None:
    faults = self.hub.faults
    if faults.wrong[name] > 0 and self.command == 'GET':
      faults.wrong[name] -= 1
      contents = bytes([contents[0] ^ 255]) + contents[1:]
    start, asked = 0, self.headers.get('Range')
    if asked:
      start = int(asked.partition('=')[2].partition('-')[0])
    body = contents[start:]
    headers: dict[str, Any] = dict(Content_Length=len(body), ETag=digest)
    if asked:
      last = len(contents) - 1
      headers['Content_Range'] = f'bytes {start}-{last}/{len(contents)}'
    cut = faults.cut.pop(name, None) if self.command == 'GET' else None
    self._say(206 if asked else 200, body[:cut], **headers)
    if cut is not None:
      self.wfile.flush()
      self.close_connection = True

  def _repository(self, kind: str, name: str) -> Repository | None:
    """The repository, if it may be read; otherwise an error is sent."""
    one = getattr(self.hub, kind).get(name)
    signed = self._is_signed()
    if one is None or one.private and not signed:
      self._error(404 if signed else 401, 'RepoNotFound', 'Not found')
      return None
    if one.gated and not signed:
      has = 'Authorization' in self.headers
      self._error(403 if has else 401, 'GatedRepo', f'{name} is restricted.')
      return None
    return one

  def _is_signed(self) -> bool:
    return self.headers.get('Authorization') == f'Bearer {TOKEN}'

  def _fault(self, codes: list[int]) -> None:
    code = codes.pop(0)
    self._say(code, b'{"error": "not now"}', Retry_After=1)

  def _error(self, code: int, kind: str, message: str) -> None:
    self._say(
      code,
      json.dumps({'error': message}).encode(),
      X_Error_Code=kind,
      X_Error_Message=message,
      Content_Type='application/json',
    )

  def _json(self, value: Any, code: int = 200) -> None:
    body = json.dumps(value).encode()
    self._say(code, body, Content_Type='application/json')

  def _say(self, code: int, body: bytes = b'', **headers: Any) -> None:
    self.send_response(code)
    headers.setdefault('Content_Length', len(body))
    for name, value in headers.items():
      self.send_header(name.replace('_', '-'), str(value))
    self.end_headers()
    if self.command != 'HEAD' and body:
      self.wfile.write(body)

  def _body(self) -> bytes:
    if 'chunked' not in (self.headers.get('Transfer-Encoding') or ''):
      return self.rfile.read(int(self.headers.get('Content-Length') or 0))
    body = b''
    while number := int(self.rfile.readline(), 16):
      body += self.rfile.read(number)
      self.rfile.readline()
    self.rfile.readline()
    return body


def _git_sha(contents: bytes) -> str:
  return hashlib.sha1(b'blob %d\0' % len(contents) + contents).hexdigest()


def _described(path: str, contents: bytes) -> dict[str, Any]:
  found: dict[str, Any] = {
    'rfilename': path,
    'size': len(contents),
    'blobId': _git_sha(contents),
  }
  if path.endswith(LARGE):
    digest = hashlib.sha256(contents).hexdigest()
    found['lfs'] = {
      'size': len(contents), 'sha256': digest, 'pointerSize': 130
    }  # fmt: skip
  return found


def put(repository: Repository, folder: pathlib.Path) -> str:
  """Commits a folder; its commit."""
  return repository.commit(
    {
      path.relative_to(folder).as_posix(): path.read_bytes()
      for path in sorted(folder.rglob('*'))
      if path.is_file()
    }
  )
