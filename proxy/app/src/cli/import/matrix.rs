//! Converts llama-swap's matrix: expressions that say which models may be loaded together. Two models that
//! share no set exclude each other, which becomes a group of `groups`. Pure.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

/// Maximum number of models, because the state grows with its third power.
const MAX_MODELS: usize = 64;
/// Maximum nesting of parentheses and sets.
const MAX_NESTING: usize = 32;

/// Indexes of two models in the file, in ascending order.
type ModelPair = (usize, usize);

/// Models of an expression, and those that occur together in one of its sets.
#[derive(Clone, Debug, Default)]
struct CoLoadedModels {
    members: BTreeSet<usize>,
    pairs: BTreeSet<ModelPair>,
    triples: BTreeSet<[usize; 3]>,
}

impl CoLoadedModels {
    /// Sets of either expression (`|`).
    fn either(mut self, other: Self) -> Self {
        self.members.extend(other.members);
        self.pairs.extend(other.pairs);
        self.triples.extend(other.triples);
        self
    }

    /// Each set of one expression joined with each of the other (`&`).
    fn join(&self, other: &Self) -> Self {
        let mut all = self.clone().either(other.clone());
        for (one, another) in [(self, other), (other, self)] {
            for &member in &one.members {
                all.pairs.extend(
                    another
                        .members
                        .iter()
                        .filter(|&&own| own != member)
                        .map(|&own| ordered_pair(own, member)),
                );
                let apart =
                    another.pairs.iter().filter(|(first, second)| ![first, second].contains(&&member));
                all.triples.extend(apart.map(|&(first, second)| ordered_triple(first, second, member)));
            }
        }
        all
    }
}

fn ordered_pair(one: usize, another: usize) -> ModelPair {
    (one.min(another), one.max(another))
}

fn ordered_triple(one: usize, another: usize, third: usize) -> [usize; 3] {
    let mut all = [one, another, third];
    all.sort_unstable();
    all
}

/// Result of the conversion.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct ExclusionGroups {
    /// Groups of models of which at most one is loaded at a time.
    pub(super) groups: Vec<Vec<usize>>,
    /// Some three models share sets pairwise but never all three, which `groups` cannot express.
    pub(super) is_looser: bool,
}

/// Converts the sets of a matrix over the models with these names. `None` if the matrix cannot be read.
pub(super) fn exclusion_groups(matrix: &Value, models: &[&str]) -> Option<ExclusionGroups> {
    if models.len() > MAX_MODELS {
        return None;
    }
    let sets = matrix["sets"].as_object()?;
    let vars = &matrix["vars"];
    let find = |name: &str| {
        let name = vars[name].as_str().unwrap_or(name);
        models.iter().position(|model| *model == name)
    };
    let mut all = CoLoadedModels::default();
    for set in sets.values() {
        all =
            all.either(MatrixParser { sets, find: &find, rest: set.as_str()?, depth: 0 }.parse_expression()?);
    }
    let apart =
        |one: usize, another: usize| one != another && !all.pairs.contains(&ordered_pair(one, another));
    let count = models.len();
    let mut open: BTreeSet<ModelPair> = (0..count)
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
                && !all.triples.contains(&ordered_triple(one, another, third))
        })
    });
    Some(ExclusionGroups { groups, is_looser })
}

/// Parser of expressions such as `a & (b | c)` or `+another-set & d`.
struct MatrixParser<'a> {
    sets: &'a Map<String, Value>,
    find: &'a dyn Fn(&str) -> Option<usize>,
    rest: &'a str,
    depth: usize,
}

impl<'a> MatrixParser<'a> {
    fn parse_expression(&mut self) -> Option<CoLoadedModels> {
        let all = self.parse_or()?;
        self.rest.trim().is_empty().then_some(all)
    }

    fn consume_sign(&mut self, sign: char) -> bool {
        self.rest = self.rest.trim_start();
        let rest = self.rest.strip_prefix(sign);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    fn parse_or(&mut self) -> Option<CoLoadedModels> {
        let mut all = self.parse_and()?;
        while self.consume_sign('|') {
            all = all.either(self.parse_and()?);
        }
        Some(all)
    }

    fn parse_and(&mut self) -> Option<CoLoadedModels> {
        let mut all = self.parse_operand()?;
        while self.consume_sign('&') {
            all = all.join(&self.parse_operand()?);
        }
        Some(all)
    }

    fn parse_operand(&mut self) -> Option<CoLoadedModels> {
        self.depth += 1;
        if self.depth > MAX_NESTING {
            return None;
        }
        let all = if self.consume_sign('(') {
            let all = self.parse_or()?;
            self.consume_sign(')').then_some(all)?
        } else if self.consume_sign('+') {
            let set = self.sets.get(self.parse_word()?)?.as_str()?;
            MatrixParser { sets: self.sets, find: self.find, rest: set, depth: self.depth }
                .parse_expression()?
        } else {
            // Skip a model that is not imported: it is never loaded with others.
            let model = (self.find)(self.parse_word()?);
            CoLoadedModels { members: model.into_iter().collect(), ..CoLoadedModels::default() }
        };
        self.depth -= 1;
        Some(all)
    }

    fn parse_word(&mut self) -> Option<&'a str> {
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

    fn read(sets: &Value) -> Option<ExclusionGroups> {
        let matrix = json!({ "vars": { "x": "a" }, "sets": sets });
        exclusion_groups(&matrix, &["a", "b", "c", "d"])
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
