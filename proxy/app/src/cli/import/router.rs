//! Imports a command that starts llama-server's router: the models of its presets and of its folder, with the
//! flags that the router passes to all of them.

use warden_config::arguments;

use crate::exit::CommandError;

use super::command::{ParsedCommand, import_listening, parse_command};
use super::imported::{ImportedCommand, ImportedConfig, ImportedModel};
use super::preset;

pub(super) type ReadFile<'a> = &'a dyn Fn(&str) -> Result<String, CommandError>;

const ROUTER_OPTIONS: [&str; 3] = ["--models-preset", "--models-dir", "--models-max"];
const ROUTER_SWITCHES: [&str; 2] = ["--models-autoload", "--no-models-autoload"];

/// Returns `None` if the command starts something else than a router.
pub(super) fn import_router(
    words: &[String],
    from: &str,
    read: ReadFile<'_>,
) -> Result<Option<ImportedConfig>, CommandError> {
    let Ok(taken) = parse_command(words) else { return Ok(None) };
    let value = |flag: &str| arguments::last_value(&taken.model.command.args, &[flag]).map(str::to_owned);
    let [file, folder, most] = ROUTER_OPTIONS.map(value);
    if file.is_none() && folder.is_none() {
        return Ok(None);
    }
    let mut imported = match &file {
        Some(file) => preset::import_preset(&read(file)?, file)?,
        None => ImportedConfig::default(),
    };
    import_listening(&taken, &mut imported, from)?;
    imported.max_loaded = most.and_then(|most| most.parse().ok()).filter(|most| *most > 0);
    if taken.model.command.args.iter().any(|word| arguments::normal_flag(word) == "--no-models-autoload") {
        imported.add_unsupported(
            "`--no-models-autoload`",
            "a model is loaded by its first request, or by `POST /models/load`",
        );
    }
    let ParsedCommand { model: ImportedModel { notes, command, .. }, unsupported, .. } = taken;
    for (what, nearest) in unsupported {
        imported.add_unsupported(what, nearest);
    }
    let command = ImportedCommand { args: without_router_flags(&command.args), ..command };
    for model in &mut imported.models {
        let own = &mut model.command;
        // Command-line flags of the router override those of a section.
        own.args.extend(command.args.iter().cloned());
        own.wrapper.clone_from(&command.wrapper);
        own.binary.clone_from(&command.binary);
        own.directory.clone_from(&command.directory);
        own.env.extend(command.env.iter().cloned());
    }
    if let Some(folder) = folder {
        imported.folders.push(folder);
        imported.defaults = Some(ImportedModel { notes, command, ..ImportedModel::default() });
        imported.unmatched.retain(|left| left.setting != preset::NO_FILE_NOTE);
    }
    Ok(Some(imported))
}

fn without_router_flags(args: &[String]) -> Vec<String> {
    let mut rest = Vec::new();
    let mut words = args.iter();
    while let Some(word) = words.next() {
        let flag = arguments::normal_flag(word);
        if ROUTER_OPTIONS.contains(&flag.as_str()) {
            words.next();
        } else if !ROUTER_SWITCHES.contains(&flag.as_str()) {
            rest.push(word.clone());
        }
    }
    rest
}
