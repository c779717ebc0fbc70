// One colour a phase, the same in the notebook and in the HTML report; one a run, everywhere.

export const PHASES = [
  'data_load',
  'forward',
  'backward',
  'optimizer_step',
  'evaluation',
  'other',
  'self',
] as const
export type Phase = (typeof PHASES)[number]

export const LABELS: Record<string, string> = {
  data_load: 'data_load',
  other: 'other spans',
  self: 'in no phase',
}

// The parts of an account are called as people read them.
const PARTS: Record<string, number> = {
  'in no phase': 6,
  'between steps': 6,
  'other scopes': 5,
  'loader set-up': 0,
  evaluation: 4,
  checkpoint: 9,
  compile: 10,
  logging: 8,
}

/** Of a part of the account; `own` is the colour of the span that it is called after. */
export function partColour(part: string, own: number): number {
  const at = PHASES.indexOf(part as Phase)
  return at >= 0 ? at : (PARTS[part] ?? own)
}

const RUN_COLOURS = 8

function hashed(text: string): number {
  let found = 0
  for (let at = 0; at < text.length; at += 1) found = (found * 31 + text.charCodeAt(at)) >>> 0
  return found
}

/** A colour for each of the runs that are shown together: always the same one, unless two clash. */
export function runColours(ids: string[]): Map<string, string> {
  const taken = new Set<number>()
  const found = new Map<string, string>()
  for (const id of ids) {
    let at = hashed(id) % RUN_COLOURS
    for (let tries = 0; taken.has(at) && tries < RUN_COLOURS; tries += 1) at = (at + 1) % RUN_COLOURS
    taken.add(at)
    found.set(id, `run-${at}`)
  }
  return found
}
