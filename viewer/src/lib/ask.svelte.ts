// Requests to the server. An answer stays on screen until the next one arrives.

import { live } from './live.svelte'

export function address(path: string, params: Record<string, string | number | null | undefined> = {}): string {
  const query = new URLSearchParams()
  for (const [key, given] of Object.entries(params)) {
    if (given !== null && given !== undefined) query.set(key, String(given))
  }
  const text = query.toString()
  return `api/${path}${text ? `?${text}` : ''}`
}

/** The address of a request about a run. */
export function about(
  run: string,
  what: string,
  params: Record<string, string | number | null | undefined> = {},
): string {
  return address(`runs/${encodeURIComponent(run)}${what ? `/${what}` : ''}`, params)
}

/** The server cannot answer yet, but will soon. */
class Busy extends Error {}

export async function fetched<T>(url: string, signal?: AbortSignal): Promise<T> {
  let response: Response
  try {
    response = await fetch(url, { signal })
  } catch (error) {
    if (signal?.aborted) throw error
    throw new Error('The server does not answer. Is `cirron serve` still running?')
  }
  if (response.status === 401 || response.status === 403) {
    throw new Error('This browser is not logged in. Open the address that `cirron serve` printed, or one that `cirron keys link` prints.')
  }
  const text = await response.text()
  let said: unknown
  try {
    said = JSON.parse(text)
  } catch {
    throw new Error(`The server answered ${response.status} with something that is not JSON.`)
  }
  if (!response.ok) {
    const reason = (said as { error?: unknown }).error
    const text = typeof reason === 'string' ? reason : `The server answered ${response.status}.`
    throw response.status === 503 ? new Busy(text) : new Error(text)
  }
  return said as T
}

export interface Asked<T> {
  readonly data: T | null
  readonly error: string | null
  readonly isBusy: boolean
}

/**
 * The answer to a request, updated when its run has new records, at most every `every` ms. While the
 * URL is null, nothing is requested and the last answer stays. When `subject` changes, the old answer
 * is dropped at once. `version` changes when there may be a new answer.
 */
export function ask<T>(
  url: () => string | null,
  run: () => string | null,
  { every = 900, subject = run, version = () => live.of(run()) }: { every?: number; subject?: () => string | null; version?: () => number } = {},
): Asked<T> {
  let data = $state.raw<T | null>(null)
  let error = $state<string | null>(null)
  let whose: string | null | undefined
  let wanted: string | null = null
  let last = 0
  let running: AbortController | null = null
  let isStale = false
  let isBusy = $state(false)
  let timer: ReturnType<typeof setTimeout> | undefined

  async function load(): Promise<void> {
    clearTimeout(timer)
    if (wanted === null) return
    running?.abort()
    const mine = (running = new AbortController())
    isStale = false
    last = performance.now()
    try {
      const found = await fetched<T>(wanted, mine.signal)
      if (mine.signal.aborted) return
      data = found
      error = null
      isBusy = false
    } catch (problem) {
      if (mine.signal.aborted) return
      error = problem instanceof Error ? problem.message : String(problem)
      isBusy = problem instanceof Busy
    }
    running = null
    if (isStale || isBusy) later()
  }

  function later(): void {
    clearTimeout(timer)
    timer = setTimeout(() => void load(), Math.max(0, last + every - performance.now()))
  }

  $effect(() => {
    const next = url()
    const owner = subject()
    void version()
    if (owner !== whose) {
      whose = owner
      data = null
      error = null
    }
    if (next !== wanted) {
      wanted = next
      if (next === null) running?.abort()
      else void load()
    } else if (running) {
      isStale = true
    } else {
      later()
    }
  })

  $effect(() => () => {
    running?.abort()
    clearTimeout(timer)
  })

  return {
    get data() {
      return data
    },
    get error() {
      return error
    },
    get isBusy() {
      return isBusy
    },
  }
}
