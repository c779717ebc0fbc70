// Builds the page into the package. `sources.json` beside it says what it was built from: a test
// compares that with the sources.
import { svelte } from '@sveltejs/vite-plugin-svelte'
import { createHash } from 'node:crypto'
import { readdirSync, readFileSync } from 'node:fs'
import { dirname, join, relative, sep } from 'node:path'
import { fileURLToPath } from 'node:url'
import { defineConfig, type Plugin } from 'vite'

const here = dirname(fileURLToPath(import.meta.url))
const BESIDE_SOURCES = ['index.html', 'package.json', 'package-lock.json', 'vite.config.ts']

function sourceFiles(folder: string): string[] {
  return readdirSync(folder, { withFileTypes: true }).flatMap((entry) => {
    const path = join(folder, entry.name)
    return entry.isDirectory() ? sourceFiles(path) : [path]
  })
}

function recordSources(): Plugin {
  return {
    name: 'record-sources',
    generateBundle() {
      const files = [...sourceFiles(join(here, 'src')), ...sourceFiles(join(here, 'public')), ...BESIDE_SOURCES.map((name) => join(here, name))]
      const named = files.map((path) => [relative(here, path).split(sep).join('/'), path])
      named.sort(([one], [other]) => (one < other ? -1 : 1))
      const digest = createHash('sha256')
      for (const [name, path] of named) digest.update(`${name}\0`).update(readFileSync(path)).update('\0')
      const source = JSON.stringify({ sha256: digest.digest('hex') }) + '\n'
      this.emitFile({ type: 'asset', fileName: 'sources.json', source })
    },
  }
}

export default defineConfig({
  base: './',
  plugins: [svelte(), recordSources()],
  build: {
    outDir: '../src/cirron/server/page',
    emptyOutDir: true,
    target: 'es2022',
    modulePreload: { polyfill: false },
    assetsInlineLimit: 0,
  },
})
