// The URL describes the view: `#/run/<id>/<tab>?key=value`. Every zoom, filter and selection is a
// parameter, so that a link shows a colleague the same view.

export const TABS = ['overview', 'timeline', 'marks', 'tensors', 'ranks', 'diff'] as const
export type Tab = (typeof TABS)[number]
export type Params = Record<string, string>

// Parameters that stay when the tab changes: the compared runs.
const KEPT = ['with']

interface View {
  run: string | null
  tab: Tab
  params: Params
}

/** Decodes text; leaves it as it is if it is not valid, as in an address typed by hand. */
function decoded(text: string): string {
  try {
    return decodeURIComponent(text)
  } catch {
    return text
  }
}

function read(): View {
  const [path, query = ''] = location.hash.replace(/^#\/?/, '').split(/\?(.*)/s)
  const [kind, id, tab] = path.split('/')
  const params = Object.fromEntries(new URLSearchParams(query))
  return {
    run: kind === 'run' && id ? decoded(id) : null,
    tab: TABS.find((one) => one === tab) ?? 'overview',
    params,
  }
}

class Route {
  run = $state<string | null>(null)
  tab = $state<Tab>('overview')
  params = $state<Params>({})

  constructor() {
    this.follow()
    addEventListener('hashchange', () => this.follow())
  }

  private follow(): void {
    const view = read()
    this.run = view.run
    this.tab = view.tab
    this.params = view.params
  }

  /** Goes to another run or tab, with an entry in the browser's history. */
  go(to: { run?: string | null; tab?: Tab; params?: Params }): void {
    const run = to.run === undefined ? this.run : to.run
    const kept = Object.fromEntries(Object.entries(this.params).filter(([key]) => KEPT.includes(key)))
    location.hash = address(run, to.tab ?? this.tab, { ...kept, ...to.params })
  }

  /** Changes parameters of this view in place; undefined removes one. */
  set(changed: Record<string, string | undefined>): void {
    const params: Params = {}
    for (const [key, value] of Object.entries({ ...this.params, ...changed })) {
      if (value !== undefined) params[key] = value
    }
    if (address(this.run, this.tab, params) === address(this.run, this.tab, this.params)) return
    this.params = params
    write(address(this.run, this.tab, params))
  }

  number(key: string): number | null {
    const found = Number(this.params[key] ?? NaN)
    return Number.isFinite(found) ? found : null
  }

  list(key: string): string[] {
    return [...new Set((this.params[key] ?? '').split(',').filter(Boolean).map(decoded))]
  }
}

export function listed(items: string[]): string | undefined {
  return items.length ? items.map(encodeURIComponent).join(',') : undefined
}

export function address(run: string | null, tab: Tab, params: Params = {}): string {
  if (run === null) return '#/'
  const query = new URLSearchParams(params).toString()
  return `#/run/${encodeURIComponent(run)}/${tab}${query ? `?${query}` : ''}`
}

// Browsers allow about 100 changes of the address in 30 s; a zoom makes more.
let waiting: ReturnType<typeof setTimeout> | undefined
function write(hash: string): void {
  clearTimeout(waiting)
  waiting = setTimeout(() => history.replaceState(null, '', hash), 150)
}
addEventListener('hashchange', () => clearTimeout(waiting))

export const route = new Route()
