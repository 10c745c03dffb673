//! Imports a command that starts llama-server's router: the models of its presets and of its folder, with
//! the flags that it passes to all.

use crate::config::arguments;
use crate::exit::Failure;

use super::command::{Taken, listening, take};
use super::{Imported, Model, preset};

/// Reads a file that the command names.
pub(super) type ReadFile<'a> = &'a dyn Fn(&str) -> Result<String, Failure>;

/// Flags of the router itself that take a value.
const OWN: [&str; 3] = ["--models-preset", "--models-dir", "--models-max"];
/// Flags of the router itself without a value.
const OWN_ALONE: [&str; 2] = ["--models-autoload", "--no-models-autoload"];

/// Imports the router that this command starts; `None` if it starts something else.
pub(super) fn import(words: &[String], from: &str, read: ReadFile<'_>) -> Result<Option<Imported>, Failure> {
    let Ok(taken) = take(words) else { return Ok(None) };
    let value = |flag: &str| {
        let args = &taken.model.args;
        let at = args.iter().rposition(|word| arguments::normal(word) == flag)?;
        args.get(at + 1).cloned()
    };
    let [file, folder, most] = OWN.map(value);
    if file.is_none() && folder.is_none() {
        return Ok(None);
    }
    let mut imported = match &file {
        Some(file) => preset::import(&read(file)?, file)?,
        None => Imported::default(),
    };
    listening(&taken, &mut imported, from)?;
    imported.max_loaded = most.and_then(|most| most.parse().ok()).filter(|most| *most > 0);
    let (own, rest) = apart(&taken.model.args);
    if own.iter().any(|word| word == "--no-models-autoload") {
        imported.left(
            "`--no-models-autoload`",
            "a model is loaded by its first request, or by `POST /models/load`",
        );
    }
    let Taken { model: Model { wrapper, binary, env, directory, notes, .. }, left, .. } = taken;
    for (what, nearest) in left {
        imported.left(what, nearest);
    }
    let for_all = Model { wrapper, binary, env, directory, notes, args: rest, ..Model::default() };
    for model in &mut imported.models {
        // Flags on the router's command line override those of a section.
        model.args.extend(for_all.args.iter().cloned());
        model.wrapper.clone_from(&for_all.wrapper);
        model.binary.clone_from(&for_all.binary);
        model.directory.clone_from(&for_all.directory);
        model.env.extend(for_all.env.iter().cloned());
    }
    if let Some(folder) = folder {
        imported.folders.push(folder);
        imported.defaults = Some(for_all);
        imported.unmatched.retain(|left| left.what != preset::NO_FILE);
    }
    Ok(Some(imported))
}

/// Separates the router's own flags from those that it passes to each model.
fn apart(args: &[String]) -> (Vec<String>, Vec<String>) {
    let (mut own, mut rest) = (Vec::new(), Vec::new());
    let mut words = args.iter();
    while let Some(word) = words.next() {
        let flag = arguments::normal(word);
        if OWN.contains(&flag.as_str()) {
            own.extend([Some(flag), words.next().cloned()].into_iter().flatten());
        } else if OWN_ALONE.contains(&flag.as_str()) {
            own.push(flag);
        } else {
            rest.push(word.clone());
        }
    }
    (own, rest)
}
