//! Imports the INI of llama-server's router (`--models-preset`). Sections are models, keys are flags
//! without dashes, and `[*]` applies to all models.

use std::collections::BTreeMap;

use warden_config::arguments;

use super::imported::{ImportedConfig, ImportedModel, is_listed};
use crate::exit::CommandError;

/// Flags without a value; the prefix `no-` switches them off.
const SWITCHES: &str = "agent cache-idle-slots cache-prompt cont-batching context-shift cors-credentials direct-io \
    escape jinja kv-offload kv-unified log-jsonl log-prefix log-timestamps mmap mmproj-auto mmproj-offload \
    models-autoload op-offload perf prefill-assistant reasoning-preserve repack skip-chat-parsing slots \
    spec-draft-backend-sampling ui ui-mcp-proxy warmup webui webui-mcp-proxy";
/// Flags without a value and without an opposite.
const PLAIN_FLAGS: &str = "backend-sampling bs check-tensors cmoe cmoed cpu-moe cpu-moe-draft embedding embeddings \
    ignore-eos log-disable log-verbose lora-init-without-apply metrics mlock no-host no-mmproj offline props rerank \
    reranking reuse-port sp spec-default spec-draft-cpu-moe special spm-infill swa-full v verbose";
/// Flags of several letters that begin with a single dash.
const SINGLE_DASH_FLAGS: [&str; 72] = [
    "Cb", "Cbd", "Cd", "Cr", "Crb", "Crd", "ag", "bf", "bs", "cb", "cl", "cmoe", "cmoed", "cms", "cram",
    "ctk", "ctkd", "ctv", "ctvd", "ctxcp", "dev", "devd", "dio", "dr", "dt", "fa", "fit", "fitc", "fitt",
    "hf", "hfd", "hff", "hfr", "hfrd", "hft", "jf", "kvo", "kvu", "lcd", "lcs", "lm", "lv", "lzm", "md",
    "mg", "mm", "mmdev", "mmu", "mu", "ncffn", "ncmoe", "ncmoed", "ngl", "ngld", "nkvo", "no-ag", "no-kvu",
    "nocb", "np", "nr", "ot", "otd", "rea", "sm", "sp", "sps", "tb", "tbd", "td", "to", "ts", "ub",
];
/// Variables of llama-server whose names differ from the flags' names.
const VARIABLE_FLAGS: [(&str, &str); 16] = [
    ("BATCH", "batch-size"),
    ("UBATCH", "ubatch-size"),
    ("CHECKPOINT_MIN_SPACING_NT", "checkpoint-min-step"),
    ("ROPE_SCALING_TYPE", "rope-scaling"),
    ("N_PARALLEL", "parallel"),
    ("STATIC_PATH", "path"),
    ("ENDPOINT_METRICS", "metrics"),
    ("ENDPOINT_PROPS", "props"),
    ("ENDPOINT_SLOTS", "slots"),
    ("THINK", "reasoning-format"),
    ("THINK_BUDGET", "reasoning-budget"),
    ("THINK_BUDGET_MESSAGE", "reasoning-budget-message"),
    ("SPEC_DRAFT_HF_REPO", "spec-draft-hf"),
    ("SPEC_DRAFT_CACHE_TYPE_K", "spec-draft-type-k"),
    ("SPEC_DRAFT_CACHE_TYPE_V", "spec-draft-type-v"),
    ("MODELS_DIR", "models-dir"),
];
const BEFORE_SECTIONS_NOTE: &str = "before the first section it is of a model `default`, which names no file: \
                      put it under `[*]` if it is for all";
const MODEL_KEYS: [&str; 10] =
    ["model", "m", "hf-repo", "hf", "hfr", "model-url", "mu", "docker-repo", "dr", "hf-file"];
const ON_VALUES: [&str; 4] = ["on", "enabled", "true", "1"];
const OFF_VALUES: [&str; 4] = ["off", "disabled", "false", "0"];

type PresetSection = BTreeMap<String, (String, usize)>;

pub(super) fn import_preset(text: &str, from: &str) -> Result<ImportedConfig, CommandError> {
    let (mut order, mut sections) = parse_sections(text, from)?;
    let mut all = sections.remove("*").unwrap_or_default();
    let mut imported = ImportedConfig::default();
    if let Some((_, line)) = all.remove("dedup-cache-models") {
        imported.add_unsupported(
            format!("`dedup-cache-models` (line {line})"),
            "models are those of this file alone",
        );
    }
    // Keys before the first section also form a model.
    let before = sections.remove("").unwrap_or_default();
    if MODEL_KEYS.iter().any(|key| before.contains_key(*key))
        && !order.iter().any(|name| name == DEFAULT_MODEL)
    {
        order.insert(0, DEFAULT_MODEL.to_owned());
        sections.insert(DEFAULT_MODEL.to_owned(), before);
    } else {
        let mut keys: Vec<_> = before.iter().filter(|(key, _)| *key != "version").collect();
        keys.sort_by_key(|(_, (_, line))| *line);
        for (key, (_, line)) in keys {
            let nearest = router_key_note(key).unwrap_or(BEFORE_SECTIONS_NOTE);
            imported.add_unsupported(format!("`{key}` (line {line})"), nearest);
        }
    }
    for name in order.iter().filter(|name| !name.is_empty() && *name != "*") {
        let own = sections.remove(name).unwrap_or_default();
        let line = |(_, (_, line)): &(String, (String, usize))| *line;
        let mut keys: Vec<_> = all.clone().into_iter().filter(|(key, _)| !own.contains_key(key)).collect();
        keys.sort_by_key(line);
        let mut own: Vec<_> = own.into_iter().collect();
        own.sort_by_key(line);
        // The model's own keys come last, because llama-server uses the last spelling of a flag.
        keys.extend(own);
        let mut model = import_section(name, keys, from, &mut imported)?;
        model.aliases.extend(router_name(name).filter(|other| !order.contains(other)));
        imported.models.push(model);
    }
    for (key, line) in truncated_values(text) {
        imported.add_unsupported(
            format!("`{key}` (line {line})"),
            "its value ends before `;` or `#`, for a router too: what follows is a comment",
        );
    }
    Ok(imported)
}

/// Returns the keys whose value is cut at a comment sign, as in `samplers = top_k;top_p`.
fn truncated_values(text: &str) -> impl Iterator<Item = (&str, usize)> {
    (1..).zip(text.lines()).filter_map(|(at, line)| {
        let (key, _) = line.split_once('=')?;
        let own = strip_comment(line);
        let rest = line.trim_start().strip_prefix(own)?;
        (rest.starts_with([';', '#']) && own.len() > key.trim().len() + 1 && !own.ends_with('='))
            .then_some((key.trim(), at))
    })
}

pub(super) const NO_FILE_NOTE: &str = "its file";

const DEFAULT_MODEL: &str = "default";

/// The router reads these keys only from its command line; in a file they have no effect.
fn router_key_note(key: &str) -> Option<&'static str> {
    Some(match key {
        "api-key" | "api-key-file" => {
            "a router takes keys from its command line alone: `llama-warden keys new`, and `server.keys`"
        }
        "models-max" => {
            "a router takes it from its command line alone; `loading.max_loaded` says how many models are loaded \
             at a time"
        }
        "models-dir" => {
            "a router takes it from its command line alone; `paths.models` names folders of models"
        }
        "models-preset" => "a router takes it from its command line alone",
        "models-autoload" | "no-models-autoload" => {
            "a router takes it from its command line alone; a model is loaded by its first request"
        }
        _ => return None,
    })
}

/// Returns the router's name for a section whose tag ends in a quantisation: only the quantisation, in
/// capitals.
fn router_name(name: &str) -> Option<String> {
    let (repository, tag) = name.rsplit_once(':')?;
    let last = tag.rsplit(['-', '.']).next().filter(|last| !last.is_empty()).unwrap_or(tag);
    let is_word = last.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    let whole = if is_word { last } else { tag };
    Some(format!("{repository}:{}", whole.to_ascii_uppercase())).filter(|other| other != name)
}

/// Accepts the name of a llama-server variable as a key.
fn flag_name(key: &str) -> String {
    let Some(variable) = key.strip_prefix("LLAMA_ARG_") else {
        return if key == "LLAMA_API_KEY" { "api-key".to_owned() } else { key.to_owned() };
    };
    let other = VARIABLE_FLAGS.iter().find(|(name, _)| *name == variable).map(|(_, flag)| (*flag).to_owned());
    other.unwrap_or_else(|| variable.to_ascii_lowercase().replace('_', "-"))
}

fn parse_sections(
    text: &str,
    from: &str,
) -> Result<(Vec<String>, BTreeMap<String, PresetSection>), CommandError> {
    let mut order = vec![String::new()];
    let mut sections = BTreeMap::<String, PresetSection>::from([(String::new(), PresetSection::new())]);
    let mut current = String::new();
    for (at, line) in (1..).zip(text.lines()) {
        let line = strip_comment(line);
        if line.is_empty() {
            continue;
        }
        let wrong = |what: &str, hint: &str| Err(CommandError::usage(format!("{from}:{at}: {what}"), hint));
        if let Some(rest) = line.strip_prefix('[') {
            let Some((name, "")) = rest.split_once(']').map(|(name, behind)| (name.trim(), behind.trim()))
            else {
                return wrong("this is no section", "write `[name of the model]`, or `[*]` for all");
            };
            if order.iter().any(|known| known == name) {
                return wrong(&format!("the section `[{name}]` is there twice"), "put its keys together");
            }
            name.clone_into(&mut current);
            order.push(name.to_owned());
        } else if let Some((key, value)) = line.split_once('=') {
            let section = sections.entry(current.clone()).or_default();
            section.insert(flag_name(key.trim()), (value.trim().to_owned(), at));
        } else {
            return wrong(
                "this is neither a section nor `key = value`",
                "write `key = value`, as in `ctx-size = 8192`",
            );
        }
    }
    Ok((order, sections))
}

/// A comment begins at `;` or `#`, even after a value.
fn strip_comment(line: &str) -> &str {
    line.find([';', '#']).map_or(line, |at| &line[..at]).trim()
}

fn import_section(
    name: &str,
    keys: Vec<(String, (String, usize))>,
    from: &str,
    imported: &mut ImportedConfig,
) -> Result<ImportedModel, CommandError> {
    let mut model = ImportedModel { name: name.to_owned(), ..ImportedModel::default() };
    for (key, (value, line)) in keys {
        let what = format!("`{key}` (line {line})");
        if let Some(nearest) = router_key_note(&key) {
            imported.add_unsupported_of(name, what, nearest);
            continue;
        }
        match key.as_str() {
            "version" => {}
            "load-on-startup" => model.loading.preload = parse_switch(&key, &value, from, line)?,
            "stop-timeout" => match value.parse() {
                Ok(seconds) => model.stop_grace = Some(seconds),
                Err(_) => {
                    return Err(CommandError::usage(
                        format!("{from}:{line}: stop-timeout = {value}: this is no number of seconds"),
                        "write a whole number",
                    ));
                }
            },
            "dedup-cache-models" => {
                imported.add_unsupported_of(name, what, "models are those of this file alone");
            }
            "host" | "port" | "reuse-port" | "ssl-key-file" | "ssl-cert-file" | "api-prefix" => {
                imported.add_unsupported_of(
                    name,
                    what,
                    "`[server]` says where llama-warden listens; a process has a socket of its own",
                );
            }
            "model" | "m" if value.starts_with('/') => model.model = Some(value),
            "tags" => {
                let tags: Vec<&str> = value.split(',').map(str::trim).filter(|tag| !tag.is_empty()).collect();
                model.listing.push(("tags", serde_json::json!(tags)));
            }
            "alias" | "a" => {
                let names = value.split(',').map(str::trim).filter(|name| !name.is_empty());
                model.aliases.extend(names.filter(|own| *own != name).map(str::to_owned));
            }
            _ => apply_flag(&key, value, from, line, &mut model)?,
        }
    }
    model.note_windows();
    let given = arguments::model_path(&model.command.args)
        .or_else(|| arguments::remote_model(&model.command.args))
        .is_some();
    if model.model.is_none() && !given && name.contains('/') {
        // The router looks up such a section's name among the downloaded models.
        model.command.args.splice(0..0, ["-hf".to_owned(), name.to_owned()]);
        model.notes.push(
            "its section names no file; a router takes the model that was downloaded under this name"
                .to_owned(),
        );
    } else if model.model.is_none() && !given {
        imported.has_folder = true;
        let nearest = "a router takes the one of this name in its `--models-dir`: \
                       name that folder in `paths.models`, or the file in `model`";
        imported.add_unsupported_of(name, NO_FILE_NOTE, nearest);
    }
    Ok(model)
}

fn parse_switch(key: &str, value: &str, from: &str, line: usize) -> Result<bool, CommandError> {
    match (ON_VALUES.contains(&value) || value.is_empty(), OFF_VALUES.contains(&value)) {
        (true, _) => Ok(true),
        (_, true) => Ok(false),
        _ => Err(CommandError::usage(
            format!("{from}:{line}: {key} = {value}: this is no switch"),
            "write `true` or `false`",
        )),
    }
}

fn apply_flag(
    key: &str,
    value: String,
    from: &str,
    line: usize,
    model: &mut ImportedModel,
) -> Result<(), CommandError> {
    if let "mmap" | "no-mmap" = key {
        model.set_mmap(parse_switch(key, &value, from, line)? == (key == "mmap"));
        return Ok(());
    }
    if let Some((name, means_on)) = switch_of(key) {
        let opposite = if means_on { format!("no-{name}") } else { name.to_owned() };
        let is_set = parse_switch(key, &value, from, line)?;
        model.command.args.push(dashed(if is_set { key } else { &opposite }));
    } else if is_plain(key) {
        // The section `[*]` may have switched the flag on, so remove it first.
        model.command.args.retain(|word| *word != dashed(key));
        if parse_switch(key, &value, from, line)? {
            model.command.args.push(dashed(key));
        }
    } else {
        model.command.args.extend([dashed(key), value]);
    }
    Ok(())
}

/// Returns the switch that the key sets, and whether a true value switches it on.
fn switch_of(key: &str) -> Option<(&str, bool)> {
    let (name, means_on) = match key {
        "ag" => ("agent", true),
        "cb" => ("cont-batching", true),
        "dio" => ("direct-io", true),
        "e" => ("escape", true),
        "kvo" => ("kv-offload", true),
        "kvu" => ("kv-unified", true),
        "no-ag" => ("agent", false),
        "nocb" => ("cont-batching", false),
        "nkvo" => ("kv-offload", false),
        "no-kvu" => ("kv-unified", false),
        "nr" => ("repack", false),
        key => key.strip_prefix("no-").map_or((key, true), |name| (name, false)),
    };
    is_listed(SWITCHES, name).then_some((name, means_on))
}

fn is_plain(key: &str) -> bool {
    // Flags of these forms select a model that llama-server can download.
    is_listed(PLAIN_FLAGS, key) || key.ends_with("-default") || key.starts_with("fim-")
}

fn dashed(key: &str) -> String {
    let dash = if key.len() == 1 || SINGLE_DASH_FLAGS.contains(&key) { "-" } else { "--" };
    format!("{dash}{key}")
}
