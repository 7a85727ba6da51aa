// Reads and zooms the charts of a page, and reads the tokens of completions.
// Without it the page is complete, but stands still.
(() => {
'use strict';
const SIZE = 1000;

// ---- numbers, as words.py writes them

const short = (value, digits) => Number(value.toPrecision(digits));

function number(value, unit) {
  if (value === null || value === undefined) return '-';
  if (unit === '%') return `${short(100 * value, 3)}\u00a0%`;
  if (Math.abs(value) >= 1000) {
    return short(value, 7).toLocaleString('en', {maximumFractionDigits: 0});
  }
  if (value !== 0 && Math.abs(value) < 1e-4) return value.toExponential(1);
  return String(short(value, 3));
}

// ---- axes, as svg.py draws them

const along = (v, log) => (log ? Math.log10(v) : v);

function at(value, [low, high], log) {
  const [a, b] = [along(low, log), along(high, log)];
  return (along(value, log) - a) / (b - a);
}

function back(share, [low, high], log) {
  const [a, b] = [along(low, log), along(high, log)];
  const value = a + share * (b - a);
  return log ? 10 ** value : value;
}

function ticks([low, high], count, whole, log) {
  if (log) {
    const first = Math.ceil(Math.log10(low) - 1e-9);
    const last = Math.floor(Math.log10(high) + 1e-9);
    const by = Math.max(1, Math.round((last - first) / count));
    const found = [];
    for (let power = first; power <= last; power += by) found.push(10 ** power);
    if (found.length > 1) return found;
    const fine = [];
    for (let power = first - 1; power <= last; power += 1) {
      fine.push(...[1, 2, 5].map(factor => short(factor * 10 ** power, 10)));
    }
    const inside = fine.filter(one => one >= low && one <= high);
    if (inside.length > 1) return inside;
  }
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const far = k => Math.abs(k * power - rough);
  let step = power * [1, 2, 5, 10].reduce((a, b) => (far(b) < far(a) ? b : a));
  if (whole) step = Math.max(1, step);
  const found = [];
  const first = Math.ceil(low / step - 1e-9);
  for (let k = first; k <= high / step + 1e-9; k += 1) {
    found.push(short(k * step, 10));
  }
  return found;
}

// The y axis of what is seen between two x, as in svg.py.
function upAxis(data, [left, right]) {
  let lines = [];
  let bands = [];
  for (const curve of data.curves) {
    curve.x.forEach((x, k) => {
      if (x < left || x > right) return;
      lines.push(curve.mean[k], ...(curve.runs || []).map(run => run[k]));
      if (curve.low && !curve.runs) lines.push(curve.low[k], curve.high[k]);
      if (curve.low) bands.push(curve.low[k], curve.high[k]);
    });
  }
  const usable = v => v !== null && (!data.yLog || v > 0);
  lines = lines.filter(usable);
  bands = bands.filter(usable);
  if (!lines.length) return data.y;
  let low = Math.min(...lines);
  let high = Math.max(...lines);
  const room = 0.4 * (high - low) || Infinity;
  if (bands.length) {
    const floor = low >= 0 ? 0 : -Infinity;
    const top = data.unit === '%' && high <= 1 ? 1 : Infinity;
    low = Math.min(low, Math.max(Math.min(...bands), low - room, floor));
    high = Math.max(high, Math.min(Math.max(...bands), high + room, top));
  }
  if (data.yLog) return [Math.max(low, 1e-300) / 1.2, high * 1.2];
  if (low > 0 && low < 0.4 * high) low = 0;
  if (high === low) {
    const wide = 0.1 * Math.abs(low) || 1;
    [low, high] = [low - wide, high + wide];
  }
  const pad = 0.04 * (high - low);
  return [low === 0 ? 0 : low - pad, high + pad];
}

// ---- charts

class Chart {
  constructor(figure) {
    this.figure = figure;
    this.data = JSON.parse(figure.querySelector('script').textContent);
    this.plot = figure.querySelector('.plot');
    this.canvas = figure.querySelector('.canvas');
    this.svg = this.canvas.querySelector('svg');
    this.reading = figure.querySelector('.reading');
    this.x = this.data.x;
    this.y = this.data.y;
    this.seen = false;
    this.cursor = this.add('path', 'cursor');
    this.zoom = this.add('rect', 'zoom');
    const places = new Set(this.data.curves.flatMap(curve => curve.x));
    this.places = [...places].sort((a, b) => a - b);
  }

  add(tag, kind) {
    const node = document.createElementNS(this.svg.namespaceURI, tag);
    node.setAttribute('class', kind);
    this.svg.append(node);
    return node;
  }

  // Where on the axis a pointer is.
  under(event) {
    const box = this.canvas.getBoundingClientRect();
    const share = (event.clientX - box.left) / box.width;
    return back(Math.min(1, Math.max(0, share)), this.x, this.data.xLog);
  }

  nearest(x) {
    const inside = this.places.filter(p => p >= this.x[0] && p <= this.x[1]);
    const far = p => Math.abs(along(p, this.data.xLog) - along(x, this.data.xLog));
    return inside.reduce((a, b) => (far(b) < far(a) ? b : a), inside[0]);
  }

  read(x, aloud) {
    this.reading.setAttribute('aria-live', aloud ? 'polite' : 'off');
    const place = x === null ? undefined : this.nearest(x);
    if (place === undefined) {
      this.cursor.setAttribute('d', '');
      this.reading.textContent = '';
      return;
    }
    const across = SIZE * at(place, this.x, this.data.xLog);
    this.cursor.setAttribute('d', `M${across} 0V${SIZE}`);
    this.reading.textContent = this.said(place);
  }

  said(place) {
    const {unit, curves} = this.data;
    const parts = [];
    let where = `${this.data.label} ${number(place)}`;
    for (const curve of curves) {
      const k = curve.x.indexOf(place);
      if (k < 0 || curve.mean[k] === null) continue;
      if (curve.since && curve.until[k] > curve.since[k]) {
        const [a, b] = [curve.since[k], curve.until[k]].map(v => number(v));
        where = `${this.data.label}s ${a} to ${b}`;
      }
      let text = number(curve.mean[k], unit);
      const has = name => curve[name] && curve[name][k] !== null;
      if (has('least') && has('low')) {
        const half = (curve.high[k] - curve.low[k]) / 2;
        text += ` ± ${number(half, unit)}`;
      }
      const [least, most] = has('least') ? ['least', 'most'] : ['low', 'high'];
      if (has(least) && curve[most][k] > curve[least][k]) {
        const ends = [curve[least][k], curve[most][k]];
        text += ` (${ends.map(v => number(v, unit)).join(' to ')})`;
      }
      parts.push(curves.length > 1 ? `${curve.name}: ${text}` : text);
    }
    return `${where}: ${parts.join('; ') || 'no number'}`;
  }

  show(range) {
    this.x = range || this.data.x;
    this.y = range ? upAxis(this.data, this.x) : this.data.y;
    const lines = this.svg.querySelectorAll('path.line');
    const bands = this.svg.querySelectorAll('path.band');
    const runs = this.svg.querySelectorAll('path.run');
    const dots = this.svg.querySelectorAll('path.dots');
    let [band, run, dot] = [0, 0, 0];
    this.data.curves.forEach((curve, k) => {
      lines[k].setAttribute('d', this.line(curve.x, curve.mean));
      for (const one of curve.runs || []) {
        runs[run].setAttribute('d', this.line(curve.x, one));
        run += 1;
      }
      if (curve.low && curve.low.filter(v => v !== null).length > 1) {
        if (bands[band]) bands[band].setAttribute('d', this.band(curve));
        band += 1;
      }
      if (curve.x.length <= 25 && dots[dot]) {
        dots[dot].setAttribute('d', this.dots(curve));
        dot += 1;
      }
    });
    this.axes();
  }

  point(x, y) {
    const low = this.data.yLog && y <= 0 ? this.y[0] : y;
    const up = 1 - Math.min(3, Math.max(-2, at(low, this.y, this.data.yLog)));
    const across = at(x, this.x, this.data.xLog);
    return `${(SIZE * across).toFixed(1)} ${(SIZE * up).toFixed(1)}`;
  }

  line(xs, ys) {
    let [text, open] = ['', false];
    xs.forEach((x, k) => {
      if (ys[k] !== null) text += (open ? 'L' : 'M') + this.point(x, ys[k]);
      open = ys[k] !== null;
    });
    return text;
  }

  dots(curve) {
    return curve.x.map((x, k) => (
      curve.mean[k] === null ? '' : `M${this.point(x, curve.mean[k])}h0`
    )).join('');
  }

  band(curve) {
    let text = '';
    let [top, bottom] = [[], []];
    const close = () => {
      if (top.length > 1) {
        text += `M${[...top, ...bottom.reverse()].join('L')}Z`;
      }
      [top, bottom] = [[], []];
    };
    curve.x.forEach((x, k) => {
      if (curve.low[k] === null || curve.high[k] === null) return close();
      top.push(this.point(x, curve.high[k]));
      bottom.push(this.point(x, curve.low[k]));
    });
    close();
    return text;
  }

  axes() {
    const {xLog, yLog, unit} = this.data;
    const label = (tick, side, share, of) => {
      const span = document.createElement('span');
      span.style[side] = `${100 * share}%`;
      span.textContent = number(tick, of);
      return span;
    };
    const up = ticks(this.y, 4, false, yLog);
    this.figure.querySelector('.y').replaceChildren(
      ...up.map(tick => label(tick, 'bottom', at(tick, this.y, yLog), unit)));
    this.figure.querySelector('.x').replaceChildren(
      ...ticks(this.x, 5, !xLog, xLog).map(
        tick => label(tick, 'left', at(tick, this.x, xLog))));
    this.svg.querySelector('.grid').setAttribute('d', up.map(
      tick => `M0 ${SIZE * (1 - at(tick, this.y, yLog))}H${SIZE}`).join(''));
  }
}

const charts = [...document.querySelectorAll('figure.chart')].map(
  figure => new Chart(figure));
const alike = chart => charts.filter(
  one => one.data.label === chart.data.label && one.data.xLog === chart.data.xLog);

// Charts that nobody sees are not written to while a pointer moves.
const watch = new IntersectionObserver(entries => {
  for (const entry of entries) {
    const chart = charts.find(one => one.figure === entry.target);
    chart.seen = entry.isIntersecting;
  }
});
charts.forEach(chart => watch.observe(chart.figure));

function readAll(chart, x, aloud) {
  for (const one of alike(chart)) {
    if (one === chart || one.seen || x === null) one.read(x, aloud && one === chart);
  }
}

function zoomAll(chart, range) {
  for (const one of alike(chart)) one.show(range);
}

// Widens or narrows what is seen about a place; null shows all.
function scaled(chart, place, factor) {
  const log = chart.data.xLog;
  const [low, high] = chart.x.map(v => along(v, log));
  const [least, most] = chart.data.x.map(v => along(v, log));
  const about = along(place, log);
  const left = Math.max(least, about - (about - low) * factor);
  const right = Math.min(most, about + (high - about) * factor);
  if (left <= least && right >= most) return null;
  return [left, right].map(v => (log ? 10 ** v : v));
}

for (const chart of charts) {
  let [start, place] = [null, null];
  const {plot, canvas, zoom} = chart;

  plot.addEventListener('pointermove', event => {
    if (event.target.closest('.canvas') === null && start === null) return;
    place = chart.under(event);
    readAll(chart, place, false);
    if (start === null) return;
    const [a, b] = [start, place].map(v => SIZE * at(v, chart.x, chart.data.xLog));
    zoom.setAttribute('x', Math.min(a, b));
    zoom.setAttribute('width', Math.abs(b - a));
    zoom.setAttribute('height', SIZE);
  });
  plot.addEventListener('pointerdown', event => {
    if (event.button || event.pointerType === 'touch') {
      if (event.pointerType === 'touch') readAll(chart, chart.under(event), true);
      return;
    }
    start = chart.under(event);
    plot.setPointerCapture(event.pointerId);
  });
  const release = event => {
    if (start === null) return;
    const range = [start, chart.under(event)].sort((a, b) => a - b);
    start = null;
    zoom.setAttribute('width', 0);
    const wide = at(range[1], chart.x, chart.data.xLog)
      - at(range[0], chart.x, chart.data.xLog);
    if (event.type === 'pointerup' && wide > 0.02) zoomAll(chart, range);
  };
  plot.addEventListener('pointerup', release);
  plot.addEventListener('pointercancel', release);
  plot.addEventListener('pointerleave', () => {
    if (start === null && document.activeElement !== plot) readAll(chart, null, false);
  });
  plot.addEventListener('dblclick', () => zoomAll(chart, null));
  plot.addEventListener('blur', () => readAll(chart, null, false));

  plot.addEventListener('keydown', event => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const inside = chart.places.filter(p => p >= chart.x[0] && p <= chart.x[1]);
    const now = place === null ? inside.length - 1
      : inside.indexOf(chart.nearest(place));
    const by = event.shiftKey ? Math.max(1, Math.round(inside.length / 10)) : 1;
    const to = {
      ArrowLeft: now - by, ArrowRight: now + by, Home: 0, End: inside.length - 1,
    }[event.key];
    if (to !== undefined && inside.length) {
      place = inside[Math.min(inside.length - 1, Math.max(0, to))];
      readAll(chart, place, true);
    } else if (event.key === '+' || event.key === '=') {
      zoomAll(chart, scaled(chart, place ?? inside[inside.length - 1], 0.5));
    } else if (event.key === '-') {
      zoomAll(chart, scaled(chart, place ?? inside[inside.length - 1], 2));
    } else if (event.key === 'Escape') {
      zoomAll(chart, null);
    } else {
      return;
    }
    event.preventDefault();
    if (place !== null) readAll(chart, place, true);
  });
}

// ---- tokens

for (const block of document.querySelectorAll('pre.tokens')) {
  const {values, writers} = block.dataset;
  const pairs = values ? values.split(' ').map(pair => pair.split(',')) : [];
  const who = writers ? writers.split(';').flatMap(some => {
    const [count, name] = some.split(',');
    return Array(Number(count)).fill(`, written by ${name}`);
  }) : [];
  const tokens = [...block.querySelectorAll('i')];
  const reading = block.parentElement.querySelector('.reading');
  let on = -1;
  const read = (k, aloud) => {
    if (tokens[on]) tokens[on].classList.remove('on');
    on = k;
    reading.setAttribute('aria-live', aloud ? 'polite' : 'off');
    if (!tokens[k]) {
      reading.textContent = '';
      return;
    }
    tokens[k].classList.add('on');
    let text = `token ${k + 1}${who[k] || ''}`;
    if (pairs[k]) {
      text += `: coefficient ${pairs[k][0]}, log-ratio ${pairs[k][1]} nats`;
    }
    reading.textContent = text;
  };
  block.addEventListener('pointerover', event => {
    const token = event.target.closest('i');
    if (token) read(tokens.indexOf(token), false);
  });
  block.addEventListener('pointerleave', () => read(-1, false));
  block.addEventListener('blur', () => read(-1, false));
  block.addEventListener('keydown', event => {
    const to = {ArrowLeft: on - 1, ArrowRight: on + 1, Home: 0,
      End: tokens.length - 1}[event.key];
    if (to === undefined) return;
    event.preventDefault();
    read(Math.min(tokens.length - 1, Math.max(0, to)), true);
    tokens[on].scrollIntoView({block: 'nearest'});
  });
}
})();
