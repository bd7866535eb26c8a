// Embedded pictures, decoded when they are looked at, and the difference of two.
const decoded = new Map();
const MOST_PIXELS = 24e6; // decoded pixels that are kept, about 100 MB

/** A canvas of an embedded picture, decoded once as long as there is room. Rejects with why there is none. */
function picture(ref) {
  if (!ref) return Promise.reject(new Error("no picture was stored"));
  if (ref.missing) return Promise.reject(new Error(ref.missing));
  const known = decoded.get(ref.digest) ?? unpack(ref);
  decoded.delete(ref.digest);
  decoded.set(ref.digest, known); // last used, last to go
  return known.then((canvas) => { makeRoom(); return canvas; });
}

async function unpackWhole(ref) {
  if (!ref.base) return read(ref.digest);
  const [difference, base] = await Promise.all([read(ref.digest), picture({ digest: ref.base })]);
  const pen = difference.getContext("2d", { willReadFrequently: true });
  const [out, under] = [pixels(difference), pixels(base)];
  for (let at = 0; at < out.data.length; at += 1) {
    if (at % 4 !== 3) out.data[at] = (out.data[at] + under.data[at]) & 255; // modulo 256, as it was taken
  }
  pen.putImageData(out, 0, 0);
  return difference;
}

function unpack(ref) {
  const waiting = unpackWhole(ref);
  waiting.then((canvas) => { waiting.pixels = canvas.width * canvas.height; }, () => {});
  return waiting;
}

/** What is embedded under a digest: a picture, or its difference from its base. */
function read(digest) {
  return new Promise((resolve, reject) => {
    const image = new Image();
    image.onload = () => {
      const canvas = el("canvas", { width: image.naturalWidth, height: image.naturalHeight });
      canvas.getContext("2d", { willReadFrequently: true }).drawImage(image, 0, 0);
      resolve(canvas);
    };
    image.onerror = () => reject(new Error("the embedded picture is damaged"));
    image.src = `data:image/webp;base64,${$(`png-${digest}`).textContent}`;
  });
}

function makeRoom() {
  let held = [...decoded.values()].reduce((sum, waiting) => sum + (waiting.pixels ?? 0), 0);
  for (const [digest, waiting] of decoded) {
    if (held <= MOST_PIXELS) return;
    held -= waiting.pixels ?? 0;
    decoded.delete(digest);
  }
}

function pixels(canvas) {
  return canvas.getContext("2d", { willReadFrequently: true }).getImageData(0, 0, canvas.width, canvas.height);
}

/** candidate − golden, amplified, around middle grey: no difference is (128, 128, 128). */
function difference(candidate, golden, gain) {
  const [a, b] = [pixels(candidate), pixels(golden)];
  const out = new ImageData(a.width, a.height);
  for (let at = 0; at < a.data.length; at += 4) {
    for (let c = 0; c < 3; c += 1) out.data[at + c] = 128 + gain * (a.data[at + c] - b.data[at + c]);
    out.data[at + 3] = 255;
  }
  return out;
}

const isPicture = (loaded) => loaded instanceof HTMLCanvasElement;

/** Where the worst seam is, else the largest difference: the place that a measurement names. */
function worstPlace(detail) {
  for (const name of ["tile_seam", "tile_step", "max_abs"]) {
    const where = detail.measurements[name]?.where;
    if (where && Number.isFinite(where.x) && Number.isFinite(where.y)) return { ...where, seam: name !== "max_abs" };
  }
  return null;
}
