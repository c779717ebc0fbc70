// Names of states and verdicts, and which tab shows the evidence.

import { briefId } from './format'
import type { RunLine } from './types'
import type { Tab } from './route.svelte'

export type Look = 'running' | 'hanging' | 'done' | 'died' | 'unknown'

export function look(run: Pick<RunLine, 'state' | 'silent_s'>): Look {
  if (run.state === 'running') return run.silent_s === null ? 'running' : 'hanging'
  if (run.state === 'clean') return 'done'
  return run.state === 'unknown' ? 'unknown' : 'died'
}

export const STATES: Record<string, string> = {
  running: 'running',
  clean: 'done',
  exception: 'failed with an exception',
  signal: 'terminated by a signal',
  killed: 'killed',
  unknown: 'end not recorded',
}

/** Good, bad or neither, for colour and shape. */
export function tone(verdict: string): 'good' | 'bad' | 'warn' | 'none' {
  if (verdict === 'healthy' || verdict === 'compute-bound') return 'good'
  if (verdict === 'died' || verdict === 'hung' || verdict === 'numerics') return 'bad'
  return verdict === 'not-enough-data' ? 'none' : 'warn'
}

/** The tab that shows the evidence of a finding. */
export function shownBy(verdict: string): Tab | null {
  if (verdict === 'died' || verdict === 'hung' || verdict === 'slow-rank') return 'ranks'
  if (verdict === 'numerics') return 'marks'
  if (verdict === 'not-enough-data' || verdict === 'healthy') return null
  return 'timeline'
}

/** The run to compare with: the previous run of the same script, if there is one. */
export function before(runs: RunLine[], id: string): RunLine | undefined {
  const at = runs.findIndex((one) => one.id === id)
  const older = runs.slice(at + 1)
  return older.find((one) => one.script === runs[at]?.script) ?? older[0] ?? runs.find((one) => one.id !== id)
}

export function name(run: Pick<RunLine, 'id' | 'script' | 'tags'>): string {
  const script = run.script?.split(/[/\\]/).pop()
  return run.tags.name ?? (script === '-c' ? 'python -c' : script) ?? briefId(run.id)
}
