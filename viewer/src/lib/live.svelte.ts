// One stream of events for the whole page: which runs have new records. After a break it resumes
// where it stopped. A hidden page has none: browsers allow six connections per server, for all tabs.

import { SvelteMap } from 'svelte/reactivity'

const SILENT_MS = 40_000 // the server sends something every 15 s

class Live {
  runs = new SvelteMap<string, number>()
  list = $state(0) // changes with the list of runs
  all = $state(0) // changes with any run
  isConnected = $state(true)
  private cursor: number | null = null
  private pause = 500
  private source: EventSource | null = null
  private heard = 0

  start(): void {
    document.addEventListener('visibilitychange', () => {
      if (document.hidden) this.close()
      else this.open()
    })
    if (!document.hidden) this.open()
    // A stream that broke silently, as when a laptop sleeps, looks open for many minutes.
    setInterval(() => {
      if (this.source === null || Date.now() - this.heard < SILENT_MS) return
      this.close()
      this.open()
    }, 5000)
  }

  private close(): void {
    this.source?.close()
    this.source = null
  }

  private open(): void {
    if (this.source !== null || document.hidden) return
    const from = this.cursor === null ? '' : `?cursor=${this.cursor}`
    const source = (this.source = new EventSource(`api/events${from}`))
    const hear = (): void => void (this.heard = Date.now())
    hear()
    source.addEventListener('alive', hear)
    source.onopen = () => {
      this.isConnected = true
      this.pause = 500
    }
    source.onmessage = (event: MessageEvent<string>) => {
      hear()
      const said = JSON.parse(event.data) as { cursor: number; kind: string; id?: string }
      this.cursor = said.cursor
      this.all += 1
      if (said.kind === 'runs') this.list += 1
      if (said.kind === 'run' && said.id) this.runs.set(said.id, (this.runs.get(said.id) ?? 0) + 1)
    }
    source.onerror = () => {
      // The browser's own retry would start again at the first cursor.
      this.close()
      this.isConnected = false
      this.all += 1 // the next request for the list shows why: no server, or an expired login
      setTimeout(() => this.open(), this.pause)
      this.pause = Math.min(this.pause * 2, 10_000)
    }
  }

  of(run: string | null): number {
    return run === null ? this.list : (this.runs.get(run) ?? 0)
  }
}

export const live = new Live()
