// Draws lanes on a canvas. The server sends no more rows than there are pixels, and all of them are
// drawn.

import { duration, label, timeStep, visible } from '../lib/format'
import { colour } from '../lib/theme.svelte'
import type { Lane, LaneRow } from '../lib/types'

export const ROW = 18
const HEAD = 20
const GAP = 6
const CHARACTER = 6.2
const MIN_LABEL = 26

export interface LaneSource {
  session: string
  title: string
  data: Lane | null
}

export interface Track {
  lane: Lane
  y: number
  rows: LaneRow[]
}

export interface Layout {
  tracks: Track[]
  heads: { y: number; title: string; session: string }[]
  height: number
}

export interface Window {
  from: number
  to: number
  width: number
}

export interface Shown {
  selected: string | null
  hovered: LaneRow | null
  search: string
  range: [number, number] | null
}

/** Computes the position of each thread's rows, one below the other. */
export function layOut(lanes: LaneSource[]): Layout {
  const tracks: Track[] = []
  const heads: Layout['heads'] = []
  let y = 0
  for (const { session, title, data } of lanes) {
    const count = data?.threads.length ?? 0
    for (let thread = 0; thread < Math.max(count, 1); thread += 1) {
      const named = count > 1 ? ` · thread ${data?.threads[thread].thread ?? '?'}` : ''
      heads.push({ y, title: title + named, session })
      y += HEAD
      const mine = (data?.rows ?? []).filter((row) => row[0] === thread)
      const deepest = mine.reduce((most, row) => Math.max(most, row[1]), 0)
      for (let depth = 0; data && depth <= deepest; depth += 1) {
        tracks.push({ lane: data, y, rows: mine.filter((row) => row[1] === depth) })
        y += ROW
      }
      y += GAP
    }
  }
  return { tracks, heads, height: Math.max(y, 60) }
}

export function drawLanes(pen: CanvasRenderingContext2D, layout: Layout, window: Window, shown: Shown): void {
  const hatching = hatch(pen)
  drawGrid(pen, window, layout.height)
  for (const head of layout.heads) {
    pen.fillStyle = colour('faint')
    pen.fillText(head.title, 6, head.y + HEAD / 2 + 1)
  }
  for (const track of layout.tracks) drawTrack(pen, track, window, shown, hatching)
  if (shown.range) {
    const [from, to] = shown.range.map((ns) => xOf(ns, window))
    pen.fillStyle = colour('accent')
    pen.globalAlpha = 0.14
    pen.fillRect(from, 0, to - from, layout.height)
    pen.globalAlpha = 1
    pen.fillRect(from, 0, 1, layout.height)
    pen.fillRect(to, 0, 1, layout.height)
  }
}

export function drawRuler(pen: CanvasRenderingContext2D, lanes: LaneSource[], window: Window): void {
  pen.fillStyle = colour('faint')
  const unit = timeStep(((window.to - window.from) * 90) / window.width)
  for (let ns = Math.ceil(window.from / unit) * unit; ns < window.to; ns += unit) {
    const x = xOf(ns, window)
    pen.fillRect(x, 14, 1, 5)
    const said = ns === 0 ? '0' : tick(ns, unit)
    if (x + 6 + pen.measureText(said).width < window.width) pen.fillText(said, x + 3, 9)
  }
  // Epochs and, if there is room, steps of the first lane.
  const data = lanes[0]?.data
  if (!data) return
  const free = new Map<number, number>() // by height: where free space starts
  // If most are merged, the numbers of the few others would be confusing.
  const isMerged = (name: string): boolean => {
    const mine = data.rows.filter((row) => data.names[row[5]] === name)
    return mine.reduce((sum, row) => sum + row[3], 0) > 2 * mine.filter((row) => row[11] !== null).length
  }
  const ruled = ['epoch', 'step', 'batch'].filter((name) => !isMerged(name))
  for (const row of [...data.rows].sort((one, other) => one[7] - other[7])) {
    const name = data.names[row[5]]
    if (!ruled.includes(name) || row[11] === null || row[6] === null) continue
    const x = Math.max(xOf(row[7], window), 0)
    const y = name === 'epoch' ? 20 : 33
    if (xOf(row[8], window) < 0 || x < (free.get(y) ?? 0)) continue
    const said = `${name} ${row[6]}`
    const wide = pen.measureText(said).width
    if (x + wide + 4 > window.width) continue
    pen.fillStyle = colour('line')
    pen.fillRect(x, y, 1, 10)
    pen.fillStyle = colour(name === 'epoch' ? 'text' : 'faint')
    pen.fillText(said, x + 4, y + 5)
    free.set(y, x + wide + 12)
  }
}

/** A time on the ruler, with the precision of its step. */
function tick(ns: number, unit: number): string {
  const seconds = Math.abs(ns) / 1e9
  if (unit >= 60e9 || seconds >= 600) return duration(ns)
  const scale: [number, string] = unit >= 1e8 ? [1e9, 's'] : unit >= 1e5 ? [1e6, 'ms'] : unit >= 1e2 ? [1e3, 'µs'] : [1, 'ns']
  const decimals = Math.max(0, -Math.floor(Math.log10(unit / scale[0]) + 1e-9))
  return `${(ns / scale[0]).toLocaleString('en-US', { minimumFractionDigits: decimals, maximumFractionDigits: decimals })} ${scale[1]}`
}

function drawGrid(pen: CanvasRenderingContext2D, window: Window, height: number): void {
  const unit = timeStep(((window.to - window.from) * 90) / window.width)
  pen.fillStyle = colour('line')
  for (let ns = Math.ceil(window.from / unit) * unit; ns < window.to; ns += unit) pen.fillRect(xOf(ns, window), 0, 1, height)
}

function drawTrack(pen: CanvasRenderingContext2D, track: Track, window: Window, shown: Shown, hatching: CanvasPattern | null): void {
  const { lane, y, rows } = track
  const bucketNs = lane.bucket
  const high = ROW - 2
  let folded: { x: number; end: number; spans: number; bucket: number } | null = null
  const close = (): void => {
    if (!folded) return
    if (hatching) {
      pen.fillStyle = hatching
      pen.fillRect(folded.x, y, folded.end - folded.x, high)
    }
    const said = `${folded.spans.toLocaleString('en-US')} merged`
    const wide = pen.measureText(said).width + 6
    if (folded.spans > 1 && folded.end - folded.x > wide + 8) {
      pen.fillStyle = colour('back')
      pen.fillRect(folded.x + 2, y + 1, wide, high - 2)
      pen.fillStyle = colour('text')
      pen.fillText(said, folded.x + 5, y + high / 2)
    }
    folded = null
  }
  for (const row of rows) {
    const [, , bucket, spans, busy, nameAt, index, start, end, lastEnd, errors, id] = row
    const name = lane.names[nameAt]
    const paint = colour(`c${lane.colours[nameAt]}`)
    const isDim = shown.search !== '' && !name.toLowerCase().includes(shown.search)
    if (spans > 1) {
      // A bucket is a block, more opaque the busier it was; adjacent buckets form one block.
      const from = lane.from + bucket * bucketNs
      const x = Math.max(xOf(from, window), 0)
      const stop = Math.min(xOf(Math.max(from + bucketNs, id === null ? Math.min(lastEnd, from + bucketNs) : 0), window), window.width)
      if (stop > 0 && x < window.width) {
        pen.globalAlpha = isDim ? 0.12 : 0.35 + 0.6 * Math.min(1, busy / bucketNs)
        pen.fillStyle = paint
        pen.fillRect(x, y, Math.max(stop - x, 0.7), high)
        pen.globalAlpha = 1
        if (folded && bucket === folded.bucket + 1 && id === null) folded = { x: folded.x, end: stop, spans: folded.spans + spans, bucket }
        else {
          close()
          folded = { x, end: stop, spans, bucket }
        }
      }
    }
    if (id === null) continue
    if (spans === 1) close()
    const x = Math.max(xOf(start, window), -2)
    const stop = Math.min(xOf(end, window), window.width + 2)
    if (stop < 0 || x > window.width) continue
    const wide = Math.max(stop - x, 0.8)
    pen.globalAlpha = isDim ? 0.15 : 1
    pen.fillStyle = lane.open.includes(id) ? fading(pen, x, stop, paint) : paint
    pen.fillRect(x, y, wide > 3 ? wide - 0.6 : wide, high)
    if (wide > MIN_LABEL) {
      pen.fillStyle = onColour(paint)
      pen.fillText(fit(label(name, index), visible(name), wide - 8), x + 4, y + high / 2)
    }
    pen.globalAlpha = 1
    if (errors) outline(pen, x, y, wide, high, colour('bad'), 2)
    if (id === shown.selected) outline(pen, x, y, wide, high, colour('text'), 2)
    else if (row === shown.hovered) outline(pen, x, y, wide, high, colour('text'), 1)
  }
  close()
}

function outline(pen: CanvasRenderingContext2D, x: number, y: number, wide: number, high: number, paint: string, line: number): void {
  pen.strokeStyle = paint
  pen.lineWidth = line
  pen.strokeRect(x + line / 2, y + line / 2, Math.max(wide - line, 1), high - line)
}

/** An open span fades out. */
function fading(pen: CanvasRenderingContext2D, x: number, end: number, paint: string): CanvasGradient {
  const gradient = pen.createLinearGradient(Math.max(x, end - Math.min(120, end - x)), 0, end, 0)
  gradient.addColorStop(0, paint)
  gradient.addColorStop(1, `${paint}40`)
  return gradient
}

export function xOf(ns: number, window: Window): number {
  return ((ns - window.from) / (window.to - window.from)) * window.width
}

/** The longest text that fits, truncated if none does. */
function fit(long: string, short: string, room: number): string {
  const most = Math.floor(room / CHARACTER)
  if (long.length <= most) return long
  if (short.length <= most) return short
  return most > 3 ? `${short.slice(0, most - 1)}…` : ''
}

function hatch(pen: CanvasRenderingContext2D): CanvasPattern | null {
  const tile = document.createElement('canvas')
  tile.width = tile.height = 6
  const inner = tile.getContext('2d')
  if (!inner) return null
  inner.strokeStyle = colour('back')
  inner.globalAlpha = 0.55
  inner.beginPath()
  inner.moveTo(-1, 7)
  inner.lineTo(7, -1)
  inner.stroke()
  return pen.createPattern(tile, 'repeat')
}

/** Black or white text, whichever has more contrast with a colour (WCAG's relative luminance). */
export function onColour(paint: string): string {
  const [red, green, blue] = [1, 3, 5].map((at) => {
    const share = parseInt(paint.slice(at, at + 2), 16) / 255
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4
  })
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? '#000000' : '#ffffff'
}

export interface Hit {
  track: Track
  row: LaneRow
}

/** The row at a position on the canvas. */
export function hitAt(layout: Layout, window: Window, x: number, y: number): Hit | null {
  const track = layout.tracks.find((one) => y >= one.y && y < one.y + ROW)
  if (!track) return null
  const { lane } = track
  const bucketNs = lane.bucket
  const nsPerPixel = (window.to - window.from) / window.width
  const at = window.from + x * nsPerPixel
  let best: LaneRow | null = null
  for (const row of track.rows) {
    const folds = row[11] === null
    const start = folds ? lane.from + row[2] * bucketNs : row[7]
    const end = folds ? start + bucketNs : Math.max(row[8], row[7] + nsPerPixel)
    if (at >= start && at <= end && (best === null || row[11] !== null)) best = row
  }
  return best && { track, row: best }
}
