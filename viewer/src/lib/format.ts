// Formats numbers: with units, at most three significant digits.

const MINUS = '−'

function digits(value: number): string {
  if (value === 0) return '0'
  const size = Math.abs(value)
  if (size >= 99.95) return value.toFixed(0)
  if (size >= 9.995) return value.toFixed(1)
  return value.toFixed(2)
}

/** 812 ns, 1.23 ms, 41.2 s, 2 h 13 m */
export function duration(ns: number | null | undefined): string {
  if (ns === null || ns === undefined || !Number.isFinite(ns)) return '–'
  const size = Math.abs(ns)
  const sign = ns < 0 ? MINUS : ''
  if (size < 1e3) return `${sign}${size.toFixed(0)} ns`
  if (size < 999.5e3) return `${sign}${digits(size / 1e3)} µs`
  if (size < 999.5e6) return `${sign}${digits(size / 1e6)} ms`
  if (size < 99.95e9) return `${sign}${digits(size / 1e9)} s`
  const seconds = Math.round(size / 1e9)
  if (seconds < 3600) return `${sign}${Math.floor(seconds / 60)} m ${seconds % 60} s`
  const minutes = Math.round(seconds / 60)
  if (minutes < 60 * 48) return `${sign}${Math.floor(minutes / 60)} h ${minutes % 60} m`
  return `${sign}${Math.floor(minutes / 1440)} d ${Math.round((minutes % 1440) / 60)} h`
}

/** A mark's value: 0.523, 1.2e-5, 64, NaN */
export function value(given: number | null | undefined): string {
  if (given === null || given === undefined) return 'NaN'
  if (!Number.isFinite(given)) return String(given)
  if (Number.isInteger(given) && Math.abs(given) < 1e6) return count(given).replace('-', MINUS)
  const size = Math.abs(given)
  const text = size >= 1e5 || size < 1e-3 ? given.toExponential(2) : given.toPrecision(3)
  return (text.includes('e') ? text.replace('e+', 'e').replace(/\.?0+e/, 'e') : String(Number(text))).replace(/^-/, MINUS)
}

export function count(given: number): string {
  return given.toLocaleString('en-US')
}

/** 0.00231, 812, 12.3 k, 4.56 M */
export function short(given: number): string {
  if (Math.abs(given) < 1) return String(Number(given.toPrecision(3)))
  const [scale, unit] = given < 999.5 ? [1, ''] : given < 999.5e3 ? [1e3, ' k'] : given < 999.5e6 ? [1e6, ' M'] : [1e9, ' G']
  return `${Number(digits(given / scale))}${unit}`
}

/** 1 rank, 4 ranks */
export function plural(given: number, noun: string): string {
  return `${count(given)} ${noun}${given === 1 ? '' : 's'}`
}

export function percent(share: number | null | undefined): string {
  if (share === null || share === undefined) return '–'
  const found = share * 100
  const size = Math.abs(found)
  if (size > 0 && size < 0.001) return '< 0.001 %'
  const text = size >= 9.95 || found === 0 ? found.toFixed(0) : size >= 0.095 ? found.toFixed(1) : found.toPrecision(1)
  return `${text} %`.replace('-', MINUS)
}

export function size(bytes: number | null | undefined): string {
  if (bytes === null || bytes === undefined) return '–'
  const units = ['B', 'KB', 'MB', 'GB', 'TB']
  let at = 0
  while (bytes >= 999.5 && at < units.length - 1) {
    bytes /= 1024
    at += 1
  }
  return `${at === 0 ? bytes : digits(bytes)} ${units[at]}`
}

/** How long ago: 12 s, 5 m, 3 h, 2 d */
export function age(ms: number, now: number): string {
  const seconds = Math.max(0, Math.round((now - ms) / 1000))
  if (seconds < 60) return `${seconds} s`
  if (seconds < 3600) return `${Math.floor(seconds / 60)} m`
  if (seconds < 48 * 3600) return `${Math.floor(seconds / 3600)} h`
  return `${Math.floor(seconds / 86400)} d`
}

export function clock(ms: number): string {
  return new Date(ms).toLocaleString('en-GB', { dateStyle: 'medium', timeStyle: 'medium' })
}

/** A name whose characters can all be seen: those that hide or reorder others are escaped. */
export function visible(name: string): string {
  const escaped = name.replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, (one) => `\\u${(one.codePointAt(0) ?? 0).toString(16).padStart(4, '0')}`)
  return escaped.trim() === '' ? '(no name)' : escaped
}

export function label(name: string, index: number | null): string {
  return index === null ? visible(name) : `${visible(name)}[${index}]`
}

/** Round steps for an axis of durations, in ns: 1, 2 and 5 of each decade, then 1, 2, 5, 10 … minutes. */
export function timeStep(ns: number): number {
  if (ns <= 30e9) {
    const unit = 10 ** Math.floor(Math.log10(Math.max(ns, 1)))
    return [1, 2, 5, 10].map((one) => one * unit).find((one) => one >= ns) ?? 10 * unit
  }
  const minutes = [0.5, 1, 2, 5, 10, 15, 30, 60, 120, 240, 480, 720, 1440]
  return (minutes.find((one) => one * 60e9 >= ns) ?? Math.ceil(ns / 86400e9) * 1440) * 60e9
}

/** A short id. Random ids differ at the start, others (`slurm-1234`) at the end. */
export function briefId(id: string): string {
  if (/^[0-9a-f]{32}$/.test(id)) return id.slice(0, 8)
  return visible(id.length <= 24 ? id : `${id.slice(0, 8)}…${id.slice(-15)}`)
}
