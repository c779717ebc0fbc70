// The server's answers. Times are in ns since the start of the run.

export interface Progress {
  steps: number
  epoch: number | null
  step: number | null
  epochs: number | null
  max_steps: number | null
  share: number | null
  left_s: number | null
}

export type State = 'running' | 'clean' | 'exception' | 'signal' | 'killed' | 'unknown'

export interface RunLine {
  id: string
  state: State
  silent_s: number | null
  ranks: number
  attempts: number
  started_ms: number
  wall_ns: number
  script: string | null
  arguments: string[]
  tags: Record<string, string>
  config: Record<string, unknown>
  commit: string | null
  branch: string | null
  is_dirty: boolean | null
  gpus: string[]
  hosts: string[]
  host_count: number
}

export interface SessionLine {
  session: string
  rank: number | null
  attempt: number
  host: string | null
  pid: number
  state: State
  start: number
  end: number
  detail: string | null
  lost: Record<string, number>
}

export interface Run extends RunLine {
  python: string | null
  versions: Record<string, string>
  main: string
  sessions: SessionLine[]
  problems: string[]
  progress: Progress
}

export interface Brief {
  verdict: string
  summary: string
  gain: number | null
  steps: number[]
  progress: Progress
}

export interface Finding {
  class: string
  summary: string
  share: number | null
  gain: { share: number; seconds: number; replay_error: number } | null
  evidence: string[]
  advice: string
  blames?: string
}

export interface Report {
  run: { device: string; steps: number }
  basis: string[]
  account: { part: string; ns: number; share: number }[]
  colours: Record<string, number> // of the parts
  findings: Finding[]
  abstained: { class: string; why: string }[]
  command: string
  primary: Finding
}

export interface Bucket {
  first: number
  last: number
  start: number
  end: number
  wall: number
  worst: number
  data_load: number
  forward: number
  backward: number
  optimizer_step: number
  evaluation: number
  other: number
  self: number
  gpu: number | null
  memory: number | null
}

export interface Outlier {
  number: number
  epoch: number | null
  step: number | null
  start: number
  end: number
  wall: number
  error: string | null
}

export interface Steps {
  total: number
  median: number
  p95: number
  buckets: Bucket[]
  outliers: Outlier[]
  bands: { name: string; start: number; end: number }[]
  batch_size: number | null
}

export interface Goodput {
  wall_ns: number
  goodput: number
  steps_done_again: number
  times: Record<string, number | null>
}

export interface MarkName {
  name: string
  points: number
  texts: number
  nonfinite: number
  last: number | null
}

export interface MarkLine {
  session: string
  rank: number | null
  attempt: number
  x: number[]
  until: number[]
  points: number[]
  mean: (number | null)[]
  low: (number | null)[]
  high: (number | null)[]
  last: (number | null)[]
  nonfinite: number[]
}

export interface Mark {
  name: string
  axis: string
  lines: MarkLine[]
  texts: { epoch: number | null; step: number | null; at: number; text: string }[]
}

/** thread, depth, bucket, spans, busy, name, index, start, end, last end, errors, id */
export type LaneRow = [
  number, number, number, number, number, number, number | null, number, number, number, number, string | null,
]

export interface Lane {
  session: string
  from: number
  to: number
  bucket: number
  threads: { pid: number | null; thread: number | null }[]
  names: string[]
  colours: number[]
  rows: LaneRow[]
  is_cut: boolean
  open: string[] // ids of open spans
}

export interface SpanDetail {
  id: string
  name: string
  index: number | null
  path: string
  epoch: number | null
  step: number | null
  error: string | null
  cpu_ns: number | null
  gpu_ns: number | null
  memory_peak_bytes: number | null
  session: string
  rank: number | null
  start: number
  end: number
  is_open: boolean
  self_ns: number
  attrs: Record<string, unknown>
  marks: { name: string; value: number | null; text: string | null; kind: string; at: number }[]
  alike: { bin: number; spans: number; faster: number; low: number; high: number; median: number }[]
  same_step: { rank: number | null; start: number; end: number; session: string }[]
}

export interface FlamePath {
  path: string
  name: string
  parent: string // its path
  depth: number
  spans: number
  errors: number
  ns: number
  self: number
  worst: number
  median: number
  colour: number
}

export interface Flame {
  from: number
  to: number
  paths: FlamePath[]
}

export interface Found {
  found: { id: string; name: string; index: number | null; start: number; end: number } | null
  total: number
}

export interface RankLine {
  session: string
  rank: number | null
  host: string | null
  pid: number
  state: State
  silent_s: number | null
  steps: number
  median: number | null
  own: number | null // the median step's time outside of backward
  worst: number | null
  slowest_in: number
  chance: number | null
  is_odd: boolean
}

export interface Ranks {
  own: boolean // the heat map shows the time outside of backward
  attempt: number
  attempts: number[]
  ranks: RankLine[]
  compared: number
  from?: number
  to?: number
  median?: number
  rows?: { session: string; rank: number | null }[]
  each?: number
  walls?: (number | null)[][]
  steps?: (number | null)[]
}

export interface Why {
  groups: {
    ranks: (number | null)[]
    state: State
    where: string
    last_step: number | null
    step_name: string // or `batch`
    has_arrived: boolean
    stack: string[]
    collective: string | null
  }[]
  problems: string[]
}

export interface TensorLine {
  tensor: string
  shape: string | null
  epoch: number | null
  mean: number | null
  std: number | null
  min: number | null
  max: number | null
  norm: number | null
  gradient_norm: number | null
  change: number | null
  nonfinite: number
  norms: (number | null)[]
  gradients: (number | null)[]
  changes: (number | null)[]
  problems: { problem: string; epoch: number | null }[]
  total: number
}

export interface Histogram {
  epoch: number | null
  mean: number | null
  std: number | null
  min: number | null
  max: number | null
  norm: number | null
  bins: number[] | null
  counts: number[] | null
}

export interface Tensor {
  name: string
  weights: Histogram[]
  gradients: Histogram[]
}

export interface Change {
  name: string
  before_ns: number
  after_ns: number
  ratio: number
  low: number
  high: number
  p: number
  outcome: 'slower' | 'faster' | 'same' | 'unknown'
}

export interface Diff {
  differences: string[]
  warnings: string[]
  changes: Change[]
  marks: {
    name: string
    compared: number
    parts_at: { epoch: number; step: number } | null
    before: number | null
    after: number | null
  }[]
}
