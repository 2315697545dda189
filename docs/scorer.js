// As Sphinx has it, but decisions, which explain why something is as it is, come after all pages on how to use it.
var Scorer = {
  score: ([page, , , , score]) => (page.startsWith("decisions/") ? score - 1000 : score),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
