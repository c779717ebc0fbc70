// Dark or light, and the style sheet's colours for drawing on canvases.

type Choice = 'system' | 'dark' | 'light'

const dark = matchMedia('(prefers-color-scheme: dark)')
const still = matchMedia('(prefers-reduced-motion: reduce)')

function stored(): Choice {
  const found = localStorage.getItem('theme')
  return found === 'dark' || found === 'light' ? found : 'system'
}

class Theme {
  choice = $state<Choice>(stored())
  private system = $state(dark.matches)
  /** Increases with each change; canvas drawing depends on it. */
  version = $state(0)

  constructor() {
    dark.addEventListener('change', () => {
      this.system = dark.matches
      this.apply()
    })
    this.apply()
  }

  get isDark(): boolean {
    return this.choice === 'system' ? this.system : this.choice === 'dark'
  }

  toggle(): void {
    this.choice = this.isDark ? 'light' : 'dark'
    localStorage.setItem('theme', this.choice)
    this.apply()
  }

  private apply(): void {
    document.documentElement.dataset.theme = this.isDark ? 'dark' : 'light'
    cache.clear()
    this.version += 1
  }
}

const cache = new Map<string, string>()

/** The value of a colour of the style sheet. */
export function colour(name: string): string {
  void theme.version
  let found = cache.get(name)
  if (found === undefined) {
    found = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim()
    cache.set(name, found)
  }
  return found
}

/** A drawing context in CSS pixels; null while the canvas has no size. */
export function penFor(canvas: HTMLCanvasElement | undefined, width: number, height: number): CanvasRenderingContext2D | null {
  void theme.version
  if (!canvas || width <= 0) return null
  const [wide, high] = [width, height].map((one) => Math.round(one * devicePixelRatio))
  if (canvas.width !== wide || canvas.height !== high) [canvas.width, canvas.height] = [wide, high]
  const pen = canvas.getContext('2d')
  if (!pen) return null
  pen.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0)
  pen.clearRect(0, 0, width, height)
  pen.font = '11px system-ui'
  pen.textBaseline = 'middle'
  return pen
}

export function isStill(): boolean {
  return still.matches
}

export const theme = new Theme()
