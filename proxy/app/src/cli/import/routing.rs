//! Imports llama-swap's rules about models that are loaded together or at the start.
//!
//! The expressions of a matrix name sets of models that may be loaded together. Models of which no two share
//! a set become a group in `groups`, of which at most one is loaded.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use super::imported::ImportedConfig;
use super::llama_swap::{UNKNOWN_KEY_NOTE, text_list};
use crate::exit::CommandError;

/// Group of all models without a group.
const DEFAULT_GROUP: &str = "(default)";
/// Limit for the pairs of groups that replace two groups which evict each other.
const MAX_PAIR_GROUPS: usize = 64;

const NEAREST_RULE: &str = "`groups` of a model name those of which at most one is loaded, `with` those that are \
                            loaded and kept together with it; without either, memory decides";

pub(super) fn import_routing(
    top: &Map<String, Value>,
    imported: &mut ImportedConfig,
    from: &str,
) -> Result<(), CommandError> {
    import_preload(top.get("hooks"), imported);
    let routing = top.get("routing").unwrap_or(&Value::Null);
    let router = &routing["router"];
    let settings = &router["settings"];
    if !routing["scheduler"]["settings"]["fifo"]["priority"].is_null() {
        imported.add_unsupported(
            "`routing.scheduler`",
            "requests of a model are served in the order in which they came",
        );
    }
    let by_matrix = top.contains_key("matrix") || router["use"] == "matrix";
    let matrix = top.get("matrix").unwrap_or(&settings["matrix"]);
    if by_matrix {
        import_matrix(matrix, imported);
        if !matrix["evict_costs"].is_null() {
            imported.add_unsupported("`evict_costs` of the matrix", "what a load takes is measured");
        }
        return Ok(());
    }
    let groups = top.get("groups").filter(|groups| groups.is_object()).unwrap_or(&settings["groups"]);
    let Some(groups) = groups.as_object().filter(|groups| !groups.is_empty()) else {
        if imported.models.len() > 1 {
            imported.max_loaded = Some(1);
        }
        return Ok(());
    };
    let mut owners = BTreeMap::<String, String>::new();
    let mut groups = groups
        .iter()
        .map(|(name, group)| SwapGroup::parse(name, group, imported, &mut owners, from))
        .collect::<Result<Vec<_>, _>>()?;
    let in_none = imported.models.iter().map(|model| &model.name).filter(|name| !owners.contains_key(*name));
    let in_none: Vec<String> = in_none.cloned().collect();
    groups.push(SwapGroup {
        name: DEFAULT_GROUP.to_owned(),
        members: in_none,
        swap: true,
        exclusive: true,
        persistent: false,
    });
    for (index, group) in groups.iter().enumerate() {
        group.apply(imported);
        for other in &groups[index + 1..] {
            group.exclude_group(other, imported);
        }
    }
    Ok(())
}

/// Models that share no set of the matrix exclude each other.
fn import_matrix(matrix: &Value, imported: &mut ImportedConfig) {
    let names: Vec<&str> = imported.models.iter().map(|model| model.name.as_str()).collect();
    let Some(ExclusionGroups { groups, is_looser }) = exclusion_groups(matrix, &names) else {
        for (name, set) in matrix["sets"].as_object().into_iter().flatten() {
            imported.add_unsupported(
                format!("the set `{name}` of the matrix: {}", super::yaml::plain_text(set)),
                NEAREST_RULE,
            );
        }
        return;
    };
    for (at, group) in groups.iter().enumerate() {
        let name = format!("matrix-{}", at + 1);
        for &model in group {
            imported.models[model].loading.groups.push(name.clone());
        }
    }
    if is_looser {
        imported.add_unsupported(
            "the matrix: three models that are in its sets two by two, but never together",
            "`groups` exclude two models at a time: all three are loaded where memory holds them",
        );
    }
}

struct SwapGroup {
    name: String,
    members: Vec<String>,
    /// At most one member is loaded at a time.
    swap: bool,
    /// Loading a member evicts the members of all other groups that are not persistent.
    exclusive: bool,
    /// Loading a member of another group evicts no member of this group.
    persistent: bool,
}

impl SwapGroup {
    fn parse(
        name: &str,
        group: &Value,
        imported: &mut ImportedConfig,
        owners: &mut BTreeMap<String, String>,
        from: &str,
    ) -> Result<Self, CommandError> {
        let keys = group.as_object().into_iter().flatten().map(|(key, _)| key.as_str());
        for key in keys.filter(|key| !["swap", "exclusive", "persistent", "members"].contains(key)) {
            imported.add_unsupported(format!("group `{name}`: `{key}`"), UNKNOWN_KEY_NOTE);
        }
        let says = |key: &str, default: bool| group[key].as_bool().unwrap_or(default);
        let mut members = text_list(group.get("members"));
        for member in &members {
            if let Some(other) = owners.insert(member.clone(), name.to_owned()) {
                return Err(CommandError::usage(
                    format!("{from}: the model `{member}` is in the group `{other}` and again in `{name}`"),
                    "a model can be in one group",
                ));
            }
        }
        members.retain(|member| {
            let is_there = imported.models.iter().any(|model| model.name == *member);
            if !is_there {
                let nearest = "there is no such model in what was imported";
                imported.add_unsupported_of(member, format!("as a member of the group `{name}`"), nearest);
            }
            is_there
        });
        let (swap, exclusive, persistent) =
            (says("swap", true), says("exclusive", true), says("persistent", false));
        Ok(Self { name: name.to_owned(), members, swap, exclusive, persistent })
    }

    fn apply(&self, imported: &mut ImportedConfig) {
        let is_group = self.swap && self.members.len() > 1;
        if is_group && self.persistent {
            imported.add_unsupported(
                format!("group `{}`: `persistent`, of models that take turns", self.name),
                "a pinned model is never unloaded, not even for one of its group: none of them is pinned",
            );
        }
        for model in imported.models.iter_mut().filter(|model| self.members.contains(&model.name)) {
            model.loading.pin |= self.persistent && !is_group;
            if is_group {
                model.loading.groups.push(self.name.clone());
            }
        }
    }

    /// Converts two groups that evict each other into groups of `groups`. If only one group evicts the other,
    /// only reports this.
    fn exclude_group(&self, other: &Self, imported: &mut ImportedConfig) {
        let drives = |one: &Self, other: &Self| one.exclusive && !other.persistent;
        let there = drives(self, other);
        let back = drives(other, self);
        if self.members.is_empty() || other.members.is_empty() || !(there || back) {
            return;
        }
        if !(there && back) {
            imported.add_unsupported(
                format!("groups `{}` and `{}`: only one evicts the other", self.name, other.name),
                "they are loaded together where memory holds both; \
                 a name in `groups` of both excludes both ways",
            );
            return;
        }
        let alone = |group: &Self| group.swap || group.members.len() < 2;
        let single = |group: &Self| -> Vec<Vec<String>> {
            if alone(group) {
                vec![group.members.clone()]
            } else {
                group.members.iter().map(|member| vec![member.clone()]).collect()
            }
        };
        let ours = single(self);
        let theirs = single(other);
        if ours.len() * theirs.len() > MAX_PAIR_GROUPS {
            let what = format!("groups `{}` and `{}` evict each other as a whole", self.name, other.name);
            imported.add_unsupported(what, NEAREST_RULE);
            return;
        }
        for (one, another) in ours.iter().flat_map(|one| theirs.iter().map(move |another| (one, another))) {
            let called = |group: &Self, members: &[String]| match members {
                [member] if !alone(group) => member.clone(),
                _ => group.name.clone(),
            };
            let name = format!("{}-or-{}", called(self, one), called(other, another));
            let both = |model: &&mut super::imported::ImportedModel| {
                one.contains(&model.name) || another.contains(&model.name)
            };
            imported.models.iter_mut().filter(both).for_each(|model| model.loading.groups.push(name.clone()));
        }
    }
}

fn import_preload(hooks: Option<&Value>, imported: &mut ImportedConfig) {
    let hooks = hooks.unwrap_or(&Value::Null);
    for name in text_list(hooks["on_startup"].get("preload")) {
        let name = name.trim();
        let found = imported.models.iter_mut().find(|model| model.answers_to(name));
        match found {
            Some(model) => model.loading.preload = true,
            None => imported.add_unsupported(
                format!("`hooks`: `{name}` is to be loaded at the start"),
                "there is no such model in what was imported",
            ),
        }
    }
    let on_startup = hooks["on_startup"].as_object().into_iter().flatten().map(|(key, _)| key.as_str());
    for key in on_startup.filter(|key| *key != "preload") {
        imported.add_unsupported(format!("`hooks.on_startup.{key}`"), UNKNOWN_KEY_NOTE);
    }
    for key in hooks.as_object().into_iter().flatten().map(|(key, _)| key).filter(|key| *key != "on_startup")
    {
        imported
            .add_unsupported(format!("`hooks.{key}`"), "`llama-warden events` shows what happens to models");
    }
}

/// The triples of models grow with the third power of this number.
const MAX_MODELS: usize = 64;
const MAX_NESTING: usize = 32;

/// Indexes of two models, in ascending order.
type ModelPair = (usize, usize);

/// Models of an expression, with the pairs and triples that occur in one of its sets.
#[derive(Clone, Debug, Default)]
struct CoLoadedModels {
    members: BTreeSet<usize>,
    pairs: BTreeSet<ModelPair>,
    triples: BTreeSet<[usize; 3]>,
}

impl CoLoadedModels {
    /// The operator `|`: the sets of both expressions.
    fn either(mut self, other: Self) -> Self {
        self.members.extend(other.members);
        self.pairs.extend(other.pairs);
        self.triples.extend(other.triples);
        self
    }

    /// The operator `&`: each set of one expression joined with each set of the other.
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

#[derive(Debug, Default, PartialEq, Eq)]
struct ExclusionGroups {
    /// At most one model of each group is loaded at a time.
    groups: Vec<Vec<usize>>,
    /// Three models share sets in pairs but have no common set, which `groups` cannot express.
    is_looser: bool,
}

/// Returns `None` if the matrix cannot be read or has too many models.
fn exclusion_groups(matrix: &Value, models: &[&str]) -> Option<ExclusionGroups> {
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

/// Parses expressions such as `a & (b | c)` or `+another-set & d`.
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
            // Skip a model that was not imported.
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
