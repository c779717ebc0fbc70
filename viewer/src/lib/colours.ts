// One colour per phase, the same as `colour_of` in view/html.py; one colour per run.

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

const RUN_COLOURS = 8

function hashed(text: string): number {
  let found = 0
  for (let at = 0; at < text.length; at += 1) found = (found * 31 + text.charCodeAt(at)) >>> 0
  return found
}

/** A colour for each run shown: a run keeps its colour, unless two clash. */
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
