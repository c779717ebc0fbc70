// The visible time range, in ns since the start of the run. Zooming is animated, unless the user
// prefers reduced motion.

import { isStill } from '../lib/theme.svelte'

const MOTION_MS = 120
const SHORTEST_NS = 200

export class View {
  from = $state(0)
  to = $state(1)
  /** Whether the whole run is visible: the view then grows with the run. */
  isAll = true
  /** Where the view is going. */
  goal = $state.raw<[number, number]>([0, 1])
  private frame = 0

  constructor(
    private whole: () => number,
    from: number | null,
    to: number | null,
  ) {
    const all = this.all()
    this.jump(from ?? all[0], to ?? all[1])
  }

  get span(): number {
    return this.to - this.from
  }

  /** The whole run, with a small margin. */
  all(): [number, number] {
    const whole = Math.max(this.whole(), 1)
    return [-0.01 * whole, 1.01 * whole]
  }

  jump(from: number, to: number): void {
    cancelAnimationFrame(this.frame)
    this.goal = this.held(from, to)
    ;[this.from, this.to] = this.goal
  }

  move(from: number, to: number): void {
    this.goal = this.held(from, to)
    if (isStill()) {
      ;[this.from, this.to] = this.goal
      return
    }
    const [first, last] = [this.from, this.to]
    const began = performance.now()
    cancelAnimationFrame(this.frame)
    const step = (now: number): void => {
      const part = Math.min(1, (now - began) / MOTION_MS)
      const eased = 1 - (1 - part) ** 3
      this.from = first + (this.goal[0] - first) * eased
      this.to = last + (this.goal[1] - last) * eased
      if (part < 1) this.frame = requestAnimationFrame(step)
    }
    this.frame = requestAnimationFrame(step)
  }

  /** Zooms, keeping the given time at its position on screen. */
  zoom(factor: number, at: number): void {
    const [from, to] = this.goal
    const place = (at - this.from) / this.span
    const moment = from + place * (to - from)
    const span = (to - from) * factor
    this.move(moment - place * span, moment + (1 - place) * span)
  }

  pan(share: number): void {
    const [from, to] = this.goal
    this.move(from + share * (to - from), to + share * (to - from))
  }

  private held(from: number, to: number): [number, number] {
    const [low, high] = this.all()
    let span = Math.min(Math.max(to - from, SHORTEST_NS), high - low)
    if (!Number.isFinite(span)) span = high - low
    const middle = (from + to) / 2
    this.isAll = span >= 0.999 * (high - low)
    const held = this.isAll ? (low + high) / 2 : Math.min(Math.max(middle, low), high)
    return [held - span / 2, held + span / 2]
  }
}
