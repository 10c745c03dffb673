//! What a search may ask for after what it asks for now: whoever builds revisions can build some of them at a time.
//!
//! ```text
//!   asked for now ── healthy ──> halfway to the ill one ── healthy ──> …      each with the chance that it comes to it,
//!                 ├─ ill ──────> halfway to the healthy one                  if each revision of the line may be the one
//!                 └─ cannot be told ──> its neighbour                        that is looked for: the likeliest first
//! ```
//!
//! Nothing of it changes what the search asks for, or what it finds.

use super::places::Places;
use super::{Phase, Search, Seen, Standing, Step};

/// The chance that a revision cannot be told: one in eight did not build in the made-up histories, and fewer upstream, where all that is
/// merged was built before.
const UNKNOWN: f64 = 0.1;
/// So many ways are looked at for each revision that is wanted: different ones lead to the same revision.
const WAYS: usize = 8;

/// What a search needs next.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ahead {
    /// Needed whatever comes of the others, unless one of them cannot be run: what is asked for now, what is being judged and what runs
    /// beside it. What is asked for now is the first. Empty where nothing is asked for any more.
    pub certain: Vec<usize>,
    /// May be asked for after those, the likeliest first; none of the others is in it.
    pub likely: Vec<usize>,
    /// What is needed or may be, in the same order, if what is asked for now cannot be run. Empty where the search is over then.
    pub otherwise: Vec<usize>,
}

/// A way that the search may take: where it looks next if earlier revisions turn out so.
struct Way {
    chance: f64,
    places: Places,
    at: usize,
}

impl Search {
    /// What may be asked for next, `most` of those for which that is not certain. Whoever asks [`Self::next`] hears the first of those that
    /// are certain. Revisions that were judged are left out, unless they are judged once more.
    pub fn ahead(&self, most: usize) -> Ahead {
        let mut search = self.clone();
        let Step::Run(ask) = search.next() else { return Ahead::default() };
        let mut without = search.clone();
        without.observe(ask, Seen::Cannot(String::new()));
        let (certain, likely) = search.look(ask.revision, most);
        let otherwise = match without.next() {
            Step::Run(ask) => {
                let (certain, likely) = without.look(ask.revision, most);
                certain.into_iter().chain(likely).collect()
            }
            Step::Done(_) => Vec::new(),
        };
        Ahead { certain, likely, otherwise }
    }

    /// What is certain and what is likely, where this revision comes next.
    fn look(self, next: usize, most: usize) -> (Vec<usize>, Vec<usize>) {
        let mut certain = vec![next];
        let (mut places, judge) = (self.places, self.kind.judge());
        let first = match self.phase {
            Phase::Ends => {
                certain.extend([places.last(), 0]);
                // Where the first one between them is does not depend on which of them is ill.
                places.differ(true);
                places.set(0, Standing::Healthy);
                places.next()
            }
            Phase::Line => {
                // Nothing is open while an end is run once more: then it is known where is looked after that.
                let open = judge.open().or_else(|| places.next());
                certain.extend(open);
                certain.extend(judge.beside());
                open
            }
            Phase::Again(queue) => {
                certain.extend(judge.open());
                certain.extend(judge.beside());
                certain.extend(queue);
                None
            }
            Phase::Over(_) => None,
        };
        let certain = once(certain);
        let likely =
            first.map_or_else(Vec::new, |at| likeliest(Way { chance: 1.0, places, at }, &certain, most));
        (certain, likely)
    }
}

/// Up to `most` revisions to which this way may lead, without those that are `certain`.
fn likeliest(first: Way, certain: &[usize], most: usize) -> Vec<usize> {
    let mut ways = vec![first];
    let mut found = Vec::new();
    for _ in 0..most.saturating_mul(WAYS) {
        // Of ways that are as likely the one that was found first: it is shorter.
        let best =
            (0..ways.len()).reduce(|best, at| if ways[at].chance > ways[best].chance { at } else { best });
        let Some(best) = best else { break };
        let Way { chance, places, at } = ways.remove(best);
        if !certain.contains(&at) && !found.contains(&at) {
            found.push(at);
        }
        if found.len() >= most {
            break;
        }
        for (standing, own) in outcomes(&places, at) {
            let mut places = places.clone();
            places.set(at, standing);
            if let Some(at) = places.next() {
                ways.push(Way { chance: chance * own, places, at });
            }
        }
    }
    found
}

/// How a revision may stand, and how likely that is. The larger the part of the line that would be left, the likelier it has the revision
/// that is looked for.
fn outcomes(places: &Places, at: usize) -> [(Standing, f64); 3] {
    let part = |part: usize, of: usize| {
        let number = |count: usize| f64::from(u32::try_from(count).unwrap_or(u32::MAX));
        if of == 0 { 0.0 } else { number(part) / number(of) }
    };
    // Without bounds it is the healthy end that is being judged, and if it is not healthy nothing comes after it.
    let ill = places.bounds().map_or(0.0, |(healthy, ill)| part(healthy.abs_diff(at), healthy.abs_diff(ill)));
    let unknown = Standing::Unknown { why: String::new() };
    [
        (Standing::Healthy, (1.0 - UNKNOWN) * (1.0 - ill)),
        (Standing::Ill, (1.0 - UNKNOWN) * ill),
        (unknown, UNKNOWN),
    ]
}

/// Each of them once, where it comes first.
fn once(all: Vec<usize>) -> Vec<usize> {
    let mut seen = Vec::new();
    for one in all {
        if !seen.contains(&one) {
            seen.push(one);
        }
    }
    seen
}
