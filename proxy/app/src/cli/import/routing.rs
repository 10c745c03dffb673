//! Who is loaded beside whom in llama-swap: groups, sets of a matrix, and what is loaded at the start.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::Imported;
use super::llama_swap::texts;
use crate::exit::Failure;

/// The nearest thing to models that drive each other out.
const ALONE: &str = "models stay loaded: `ttl` unloads those that nobody asks for, and `llama-warden plan` says who fits together";

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
            imported.left(format!("the set `{name}` of the matrix: {}", super::yaml::plain(set)), ALONE);
        }
        if !matrix["evict_costs"].is_null() {
            imported.left("`evict_costs` of the matrix", "no model is unloaded to make room for another");
        }
        return Ok(());
    }
    let groups = top.get("groups").filter(|groups| groups.is_object()).unwrap_or(&settings["groups"]);
    let Some(groups) = groups.as_object().filter(|groups| !groups.is_empty()) else {
        if imported.models.len() > 1 {
            imported.left("one model at a time, as without groups", ALONE);
        }
        return Ok(());
    };
    let mut owners = BTreeMap::<String, String>::new();
    for (name, group) in groups {
        one(name, group, imported, &mut owners, from)?;
    }
    Ok(())
}

/// One group. Its members are loaded together where nothing else is said, and none is ever unloaded to make room: so `persistent`, and no
/// `swap`, are what is done here anyway.
fn one(
    name: &str,
    group: &Value,
    imported: &mut Imported,
    owners: &mut BTreeMap<String, String>,
    from: &str,
) -> Result<(), Failure> {
    let says = |key: &str, default: bool| group[key].as_bool().unwrap_or(default);
    let (swap, exclusive, persistent) =
        (says("swap", true), says("exclusive", true), says("persistent", false));
    let mut members = texts(group.get("members"));
    for member in &members {
        if let Some(other) = owners.insert(member.clone(), name.to_owned()) {
            return Err(Failure::usage(
                format!("{from}: the model `{member}` is in the group `{other}` and again in `{name}`"),
                "a model can be in one group",
            ));
        }
    }
    let known = |member: &String| imported.models.iter().any(|model| model.name == *member);
    let (there, gone): (Vec<_>, Vec<_>) = members.drain(..).partition(known);
    for member in gone {
        imported.left(
            format!("group `{name}`: its member `{member}`"),
            "there is no such model in what was imported",
        );
    }
    if swap && there.len() > 1 {
        imported.left(format!("group `{name}`: one of {} at a time", there.join(", ")), ALONE);
    }
    if exclusive && !persistent {
        imported.left(format!("group `{name}`: `exclusive`"), ALONE);
    }
    Ok(())
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
