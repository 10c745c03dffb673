//! Converts llama-swap's matrix: expressions that say which models may be loaded together. Two models that
//! share no set exclude each other, which becomes a group of `groups`. Pure.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

/// Maximum number of models, because the state grows with its third power.
const MOST_MODELS: usize = 64;
/// Maximum nesting of parentheses and sets.
const DEPTH: usize = 32;

/// Indexes of two models in the file, in ascending order.
type Pair = (usize, usize);

/// Models of an expression, and those that occur together in one of its sets.
#[derive(Clone, Debug, Default)]
struct Together {
    members: BTreeSet<usize>,
    pairs: BTreeSet<Pair>,
    triples: BTreeSet<[usize; 3]>,
}

impl Together {
    /// Sets of either expression (`|`).
    fn or(mut self, other: Self) -> Self {
        self.members.extend(other.members);
        self.pairs.extend(other.pairs);
        self.triples.extend(other.triples);
        self
    }

    /// Each set of one expression joined with each of the other (`&`).
    fn and(&self, other: &Self) -> Self {
        let mut all = self.clone().or(other.clone());
        for (one, another) in [(self, other), (other, self)] {
            for &member in &one.members {
                all.pairs.extend(
                    another.members.iter().filter(|&&own| own != member).map(|&own| pair(own, member)),
                );
                let apart =
                    another.pairs.iter().filter(|(first, second)| ![first, second].contains(&&member));
                all.triples.extend(apart.map(|&(first, second)| triple(first, second, member)));
            }
        }
        all
    }
}

fn pair(one: usize, another: usize) -> Pair {
    (one.min(another), one.max(another))
}

fn triple(one: usize, another: usize, third: usize) -> [usize; 3] {
    let mut all = [one, another, third];
    all.sort_unstable();
    all
}

/// Result of the conversion.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Exclusions {
    /// Groups of models of which at most one is loaded at a time.
    pub(super) groups: Vec<Vec<usize>>,
    /// Some three models share sets pairwise but never all three, which `groups` cannot express.
    pub(super) is_looser: bool,
}

/// Converts the sets of a matrix over the models with these names. `None` if the matrix cannot be read.
pub(super) fn exclusions(matrix: &Value, models: &[&str]) -> Option<Exclusions> {
    if models.len() > MOST_MODELS {
        return None;
    }
    let sets = matrix["sets"].as_object()?;
    let vars = &matrix["vars"];
    let find = |name: &str| {
        let name = vars[name].as_str().unwrap_or(name);
        models.iter().position(|model| *model == name)
    };
    let mut all = Together::default();
    for set in sets.values() {
        all = all.or(Reader { sets, find: &find, rest: set.as_str()?, depth: 0 }.whole()?);
    }
    let apart = |one: usize, another: usize| one != another && !all.pairs.contains(&pair(one, another));
    let count = models.len();
    let mut open: BTreeSet<Pair> = (0..count)
        .flat_map(|one| (one + 1..count).map(move |other| (one, other)))
        .filter(|&(a, b)| apart(a, b))
        .collect();
    let mut groups = Vec::new();
    while let Some(&(first, second)) = open.first() {
        let mut group = vec![first, second];
        for model in 0..count {
            if group.iter().all(|&member| apart(member, model)) {
                group.push(model);
            }
        }
        group.sort_unstable();
        open.retain(|(one, another)| !(group.contains(one) && group.contains(another)));
        groups.push(group);
    }
    let is_looser = all.pairs.iter().any(|&(one, another)| {
        (another + 1..count).any(|third| {
            !apart(one, third)
                && !apart(another, third)
                && !all.triples.contains(&triple(one, another, third))
        })
    });
    Some(Exclusions { groups, is_looser })
}

/// Parser of expressions such as `a & (b | c)` or `+another-set & d`.
struct Reader<'a> {
    sets: &'a Map<String, Value>,
    find: &'a dyn Fn(&str) -> Option<usize>,
    rest: &'a str,
    depth: usize,
}

impl<'a> Reader<'a> {
    fn whole(&mut self) -> Option<Together> {
        let all = self.either()?;
        self.rest.trim().is_empty().then_some(all)
    }

    fn takes(&mut self, sign: char) -> bool {
        self.rest = self.rest.trim_start();
        let rest = self.rest.strip_prefix(sign);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    fn either(&mut self) -> Option<Together> {
        let mut all = self.both()?;
        while self.takes('|') {
            all = all.or(self.both()?);
        }
        Some(all)
    }

    fn both(&mut self) -> Option<Together> {
        let mut all = self.one()?;
        while self.takes('&') {
            all = all.and(&self.one()?);
        }
        Some(all)
    }

    fn one(&mut self) -> Option<Together> {
        self.depth += 1;
        if self.depth > DEPTH {
            return None;
        }
        let all = if self.takes('(') {
            let all = self.either()?;
            self.takes(')').then_some(all)?
        } else if self.takes('+') {
            let set = self.sets.get(self.word()?)?.as_str()?;
            Reader { sets: self.sets, find: self.find, rest: set, depth: self.depth }.whole()?
        } else {
            // Skip a model that is not imported: it is never loaded with others.
            let model = (self.find)(self.word()?);
            Together { members: model.into_iter().collect(), ..Together::default() }
        };
        self.depth -= 1;
        Some(all)
    }

    fn word(&mut self) -> Option<&'a str> {
        let rest = self.rest.trim_start();
        let end = rest.find(|c: char| !(c.is_alphanumeric() || "_-.".contains(c))).unwrap_or(rest.len());
        self.rest = &rest[end..];
        Some(&rest[..end]).filter(|word| !word.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(sets: &Value) -> Option<Exclusions> {
        let matrix = json!({ "vars": { "x": "a" }, "sets": sets });
        exclusions(&matrix, &["a", "b", "c", "d"])
    }

    #[test]
    fn two_models_that_no_set_has_together_exclude_each_other() {
        let groups = |sets| read(&sets).map(|all| (all.groups, all.is_looser));
        assert_eq!(groups(json!({ "s": "a & b & c & d" })), Some((vec![], false)));
        assert_eq!(groups(json!({ "s": "(x | b) & c" })), Some((vec![vec![0, 1, 3], vec![2, 3]], false)));
        assert_eq!(
            groups(json!({ "one": "a | b", "s": "+one & c & gone" })),
            groups(json!({ "s": "(a|b) & c" }))
        );
        assert_eq!(groups(json!({ "s": "a & b | c" })), Some((vec![vec![0, 2, 3], vec![1, 2, 3]], false)));
        assert_eq!(groups(json!({ "s": "gone" })), Some((vec![vec![0, 1, 2, 3]], false)));
        let two = json!({ "s": "a & b", "t": "b & c", "u": "a & c" });
        assert_eq!(groups(two), Some((vec![vec![0, 3], vec![1, 3], vec![2, 3]], true)));
    }

    #[test]
    fn what_is_no_expression_is_none() {
        for set in ["", "a &", "(a", "a b", "+none", "+s", "a ? b"] {
            assert_eq!(read(&json!({ "s": set })), None, "{set}");
        }
        assert_eq!(read(&json!({ "s": "(".repeat(100_000) })), None);
        assert_eq!(read(&json!({ "s": 1 })), None);
    }
}
