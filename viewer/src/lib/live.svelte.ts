// One stream of events for the whole page: which runs have new records. It goes on where it was cut.
// A hidden page has none: browsers allow six connections to a server, for all its tabs together.

import { SvelteMap } from 'svelte/reactivity'

class Live {
  runs = new SvelteMap<string, number>()
  list = $state(0)
  isConnected = $state(true)
  private cursor: number | null = null
  private pause = 500
  private source: EventSource | null = null

  start(): void {
    document.addEventListener('visibilitychange', () => {
      if (document.hidden) this.close()
      else this.open()
    })
    if (!document.hidden) this.open()
  }

  private close(): void {
    this.source?.close()
    this.source = null
  }

  private open(): void {
    if (this.source !== null || document.hidden) return
    const from = this.cursor === null ? '' : `?cursor=${this.cursor}`
    const source = (this.source = new EventSource(`api/events${from}`))
    source.onopen = () => {
      this.isConnected = true
      this.pause = 500
    }
    source.onmessage = (event: MessageEvent<string>) => {
      const said = JSON.parse(event.data) as { cursor: number; kind: string; id?: string }
      this.cursor = said.cursor
      if (said.kind === 'runs') this.list += 1
      if (said.kind === 'run' && said.id) this.runs.set(said.id, (this.runs.get(said.id) ?? 0) + 1)
    }
    source.onerror = () => {
      // The browser's own retry would begin with the first cursor again.
      this.close()
      this.isConnected = false
      setTimeout(() => this.open(), this.pause)
      this.pause = Math.min(this.pause * 2, 10_000)
    }
  }

  of(run: string | null): number {
    return run === null ? this.list : (this.runs.get(run) ?? 0)
  }
}

export const live = new Live()
