// The colour of each class: the usual ones have their own, others take what is left.
const OWN = { interactive: 1, priority: 2, flex: 3, batch: 4 };
const LEFT = [5, 6, 7, 8];
export const OTHERS = "(others)"; // classes that are counted together

/** The number of a class's colour; 0 for classes that are counted together. */
export function threadOf(name, names) {
  if (name === OTHERS) return 0;
  if (name in OWN) return OWN[name];
  const others = names.filter((other) => !(other in OWN));
  return LEFT[Math.max(0, others.indexOf(name)) % LEFT.length];
}
