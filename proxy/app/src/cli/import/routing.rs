//! Who is loaded beside whom in llama-swap: groups, sets of a matrix, and what is loaded at the start.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::Imported;
use super::llama_swap::texts;
use crate::exit::Failure;

/// The nearest thing to a rule that is none here.
const NEAREST: &str = "`groups` of a model name those of which at most one is loaded, `with` those that come and stay along with it; without either, memory decides";

pub(super) fn import(top: &Map<String, Value>, imported: &mut Imported, from: &str) -> Result<(), Failure> {
    preload(top.get("hooks"), imported);
    let routing = top.get("routing").unwrap_or(&Value::Null);
    let router = &routing["router"];
    let settings = &router["settings"];
    if !routing["scheduler"]["settings"]["fifo"]["priority"].is_null() {
        imported
            .left("`routing.scheduler`", "requests of a model are served in the order in which they came");
    }
    let by_matrix = top.contains_key("matrix") || router["use"] == "matrix";
    let matrix = top.get("matrix").unwrap_or(&settings["matrix"]);
    if by_matrix {
        for (name, set) in matrix["sets"].as_object().into_iter().flatten() {
            imported.left(format!("the set `{name}` of the matrix: {}", super::yaml::plain(set)), NEAREST);
        }
        if !matrix["evict_costs"].is_null() {
            imported.left("`evict_costs` of the matrix", "what a load takes is measured");
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
    let groups = groups
        .iter()
        .map(|(name, group)| Group::read(name, group, imported, &mut owners, from))
        .collect::<Result<Vec<_>, _>>()?;
    for (index, group) in groups.iter().enumerate() {
        group.put(imported);
        for other in &groups[index + 1..] {
            group.exclude(other, imported);
        }
    }
    Ok(())
}

/// One group.
struct Group {
    name: String,
    members: Vec<String>,
    /// One of them at a time.
    swap: bool,
    /// Those of other groups leave for one of them ...
    exclusive: bool,
    /// ... but not these.
    persistent: bool,
}

impl Group {
    fn read(
        name: &str,
        group: &Value,
        imported: &mut Imported,
        owners: &mut BTreeMap<String, String>,
        from: &str,
    ) -> Result<Self, Failure> {
        let says = |key: &str, default: bool| group[key].as_bool().unwrap_or(default);
        let mut members = texts(group.get("members"));
        for member in &members {
            if let Some(other) = owners.insert(member.clone(), name.to_owned()) {
                return Err(Failure::usage(
                    format!("{from}: the model `{member}` is in the group `{other}` and again in `{name}`"),
                    "a model can be in one group",
                ));
            }
        }
        members.retain(|member| {
            let is_there = imported.models.iter().any(|model| model.name == *member);
            if !is_there {
                imported.unmatched.push(super::Unmatched {
                    what: format!("group `{name}`: its member `{member}`"),
                    nearest: "there is no such model in what was imported".to_owned(),
                });
            }
            is_there
        });
        let (swap, exclusive, persistent) =
            (says("swap", true), says("exclusive", true), says("persistent", false));
        Ok(Self { name: name.to_owned(), members, swap, exclusive, persistent })
    }

    fn put(&self, imported: &mut Imported) {
        let is_group = self.swap && self.members.len() > 1;
        for model in imported.models.iter_mut().filter(|model| self.members.contains(&model.name)) {
            model.pin |= self.persistent;
            if is_group {
                model.groups.push(self.name.clone());
            }
        }
    }

    /// One group drives another out. Between two of which each has one model at a time that is one more group.
    fn exclude(&self, other: &Self, imported: &mut Imported) {
        let drives = |one: &Self, other: &Self| one.exclusive && !other.persistent;
        if self.members.is_empty()
            || other.members.is_empty()
            || !(drives(self, other) || drives(other, self))
        {
            return;
        }
        if self.persistent || other.persistent {
            imported.left(
                format!("groups `{}` and `{}`: only one drives the other out", self.name, other.name),
                "a group of models excludes both ways, and a pinned one never leaves",
            );
            return;
        }
        let alone = |group: &Self| group.swap || group.members.len() < 2;
        if !alone(self) || !alone(other) {
            let what = format!("groups `{}` and `{}` drive each other out as a whole", self.name, other.name);
            imported.left(what, NEAREST);
            return;
        }
        let name = format!("{}-or-{}", self.name, other.name);
        let both = |model: &&mut super::Model| {
            self.members.contains(&model.name) || other.members.contains(&model.name)
        };
        imported.models.iter_mut().filter(both).for_each(|model| model.groups.push(name.clone()));
    }
}

fn preload(hooks: Option<&Value>, imported: &mut Imported) {
    let hooks = hooks.unwrap_or(&Value::Null);
    for name in texts(hooks["on_startup"].get("preload")) {
        let name = name.trim();
        let found = imported
            .models
            .iter_mut()
            .find(|model| model.name == name || model.aliases.iter().any(|own| own == name));
        match found {
            Some(model) => model.preload = true,
            None => imported.left(
                format!("`hooks`: `{name}` is to be loaded at the start"),
                "there is no such model in what was imported",
            ),
        }
    }
    for key in hooks.as_object().into_iter().flatten().map(|(key, _)| key).filter(|key| *key != "on_startup")
    {
        imported.left(format!("`hooks.{key}`"), "`llama-warden events` tells what happens to models");
    }
}
