//! The INI of llama-server's router (`--models-preset`): sections are models, keys are flags without dashes, `[*]` is for all.

use std::collections::BTreeMap;

use super::{Imported, Model};
use crate::config::arguments;
use crate::exit::Failure;

/// Flags without a value that are switched off by another flag.
const SWITCHES: [(&str, &str); 36] = [
    ("agent", "no-agent"),
    ("ag", "no-agent"),
    ("cache-idle-slots", "no-cache-idle-slots"),
    ("cache-prompt", "no-cache-prompt"),
    ("cont-batching", "no-cont-batching"),
    ("cb", "no-cont-batching"),
    ("context-shift", "no-context-shift"),
    ("cors-credentials", "no-cors-credentials"),
    ("direct-io", "no-direct-io"),
    ("dio", "no-direct-io"),
    ("escape", "no-escape"),
    ("e", "no-escape"),
    ("jinja", "no-jinja"),
    ("kv-offload", "no-kv-offload"),
    ("kvo", "no-kv-offload"),
    ("kv-unified", "no-kv-unified"),
    ("kvu", "no-kv-unified"),
    ("log-prefix", "no-log-prefix"),
    ("log-timestamps", "no-log-timestamps"),
    ("mmap", "no-mmap"),
    ("mmproj-auto", "no-mmproj-auto"),
    ("mmproj-offload", "no-mmproj-offload"),
    ("models-autoload", "no-models-autoload"),
    ("op-offload", "no-op-offload"),
    ("perf", "no-perf"),
    ("prefill-assistant", "no-prefill-assistant"),
    ("reasoning-preserve", "no-reasoning-preserve"),
    ("repack", "no-repack"),
    ("skip-chat-parsing", "no-skip-chat-parsing"),
    ("slots", "no-slots"),
    ("spec-draft-backend-sampling", "no-spec-draft-backend-sampling"),
    ("ui", "no-ui"),
    ("ui-mcp-proxy", "no-ui-mcp-proxy"),
    ("warmup", "no-warmup"),
    ("webui", "no-webui"),
    ("webui-mcp-proxy", "no-webui-mcp-proxy"),
];
/// Flags without a value that can only be given or left out.
const PLAIN: [&str; 29] = [
    "backend-sampling",
    "bs",
    "check-tensors",
    "cmoe",
    "cmoed",
    "cpu-moe",
    "cpu-moe-draft",
    "embedding",
    "embeddings",
    "ignore-eos",
    "log-disable",
    "log-verbose",
    "lora-init-without-apply",
    "metrics",
    "mlock",
    "no-host",
    "no-mmproj",
    "offline",
    "props",
    "rerank",
    "reranking",
    "reuse-port",
    "sp",
    "spec-default",
    "special",
    "spm-infill",
    "swa-full",
    "v",
    "verbose",
];
/// Flags that are written with one dash, beside those of one letter.
const SHORT: [&str; 63] = [
    "Cb", "Cbd", "Cd", "Cr", "Crb", "Crd", "ag", "bs", "cb", "cl", "cmoe", "cmoed", "cms", "cram", "ctk",
    "ctkd", "ctv", "ctvd", "ctxcp", "dev", "devd", "dio", "dr", "dt", "fa", "fit", "fitc", "fitt", "hf",
    "hfd", "hff", "hfr", "hfrd", "hft", "jf", "kvo", "kvu", "lcd", "lcs", "lm", "lv", "md", "mg", "mm",
    "mmdev", "mmu", "mu", "ncmoe", "ncmoed", "ngl", "ngld", "np", "nr", "ot", "otd", "rea", "sm", "sp",
    "sps", "tb", "tbd", "td", "ub",
];
/// How a switch is written.
const ON: [&str; 4] = ["on", "enabled", "true", "1"];
const OFF: [&str; 4] = ["off", "disabled", "false", "0"];

type Section = BTreeMap<String, (String, usize)>;

pub(super) fn import(text: &str, from: &str) -> Result<Imported, Failure> {
    let (order, mut sections) = parse(text, from)?;
    let mut all = sections.remove("").unwrap_or_default();
    all.extend(sections.remove("*").unwrap_or_default());
    let mut imported = Imported::default();
    if let Some((_, line)) =
        all.remove("dedup-cache-models").or_else(|| all.remove("LLAMA_ARG_DEDUP_CACHE_MODELS"))
    {
        imported.left(format!("`dedup-cache-models` (line {line})"), "models are those of this file alone");
    }
    for name in order.iter().filter(|name| !name.is_empty() && *name != "*") {
        let own = sections.remove(name).unwrap_or_default();
        let line = |(_, (_, line)): &(String, (String, usize))| *line;
        let mut keys: Vec<_> = all.clone().into_iter().filter(|(key, _)| !own.contains_key(key)).collect();
        keys.sort_by_key(line);
        let mut own: Vec<_> = own.into_iter().collect();
        own.sort_by_key(line);
        // A model's own come last: of two spellings of one flag, llama-server takes the last.
        keys.extend(own);
        let model = model(name, keys, from, &mut imported)?;
        imported.models.push(model);
    }
    Ok(imported)
}

/// The sections in their order, and what is in each.
fn parse(text: &str, from: &str) -> Result<(Vec<String>, BTreeMap<String, Section>), Failure> {
    let mut order = vec![String::new()];
    let mut sections = BTreeMap::<String, Section>::from([(String::new(), Section::new())]);
    let mut current = String::new();
    for (at, line) in (1..).zip(text.lines()) {
        let line = uncommented(line);
        if line.is_empty() {
            continue;
        }
        let wrong = |what: &str, hint: &str| Err(Failure::usage(format!("{from}:{at}: {what}"), hint));
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
            section.insert(key.trim().to_owned(), (value.trim().to_owned(), at));
        } else {
            return wrong(
                "this is neither a section nor `key = value`",
                "write `key = value`, as in `ctx-size = 8192`",
            );
        }
    }
    Ok((order, sections))
}

/// A comment begins at `;` or `#`, also behind a value.
fn uncommented(line: &str) -> &str {
    line.find([';', '#']).map_or(line, |at| &line[..at]).trim()
}

fn model(
    name: &str,
    keys: Vec<(String, (String, usize))>,
    from: &str,
    imported: &mut Imported,
) -> Result<Model, Failure> {
    let mut model = Model { name: name.to_owned(), ..Model::default() };
    for (key, (value, line)) in keys {
        let of = format!("model `{name}`: `{key}` (line {line})");
        match key.as_str() {
            "version" => {}
            "load-on-startup" => model.preload = switch(&key, &value, from, line)?,
            "stop-timeout" => match value.parse() {
                Ok(seconds) => model.stop_grace = Some(seconds),
                Err(_) => {
                    return Err(Failure::usage(
                        format!("{from}:{line}: stop-timeout = {value}: this is no number of seconds"),
                        "write a whole number",
                    ));
                }
            },
            "dedup-cache-models" => imported.left(of, "models are those of this file alone"),
            "host" | "port" | "reuse-port" | "ssl-key-file" | "ssl-cert-file" | "api-prefix" => {
                imported.left(
                    of,
                    "`[server]` says where llama-warden listens; a process has a socket of its own",
                );
            }
            "model" | "m" if value.starts_with('/') => model.model = Some(value),
            "alias" | "a" | "LLAMA_ARG_ALIAS" => {
                let names = value.split(',').map(str::trim).filter(|name| !name.is_empty());
                model.aliases.extend(names.filter(|own| *own != name).map(str::to_owned));
            }
            _ if key.starts_with("LLAMA_ARG_") => model.env.push((key, value)),
            _ => flag(&key, value, from, line, &mut model, imported)?,
        }
    }
    let named =
        model.env.iter().any(|(name, _)| matches!(name.as_str(), "LLAMA_ARG_MODEL" | "LLAMA_ARG_HF_REPO"));
    let given = arguments::model(&model.args).or_else(|| arguments::remote_model(&model.args)).is_some();
    if model.model.is_none() && !given && !named {
        // The router looks for a model of this name among those that were downloaded.
        model.args.splice(0..0, ["-hf".to_owned(), name.to_owned()]);
        model.notes.push(
            "its section names no file; a router takes the model that was downloaded under this name"
                .to_owned(),
        );
    }
    Ok(model)
}

fn switch(key: &str, value: &str, from: &str, line: usize) -> Result<bool, Failure> {
    match (ON.contains(&value), OFF.contains(&value)) {
        (true, _) => Ok(true),
        (_, true) => Ok(false),
        _ => Err(Failure::usage(
            format!("{from}:{line}: {key} = {value}: this is no switch"),
            "write `true` or `false`",
        )),
    }
}

fn flag(
    key: &str,
    value: String,
    from: &str,
    line: usize,
    model: &mut Model,
    left: &mut Imported,
) -> Result<(), Failure> {
    if let "mmap" | "no-mmap" = key {
        model.set_mmap(switch(key, &value, from, line)? == (key == "mmap"));
        return Ok(());
    }
    let positive = SWITCHES.iter().find(|(name, _)| *name == key);
    let negative = SWITCHES.iter().find(|(_, no)| *no == key);
    if let Some((_, no)) = positive {
        let on = switch(key, &value, from, line)?;
        model.args.push(if on { dashed(key) } else { dashed(no) });
    } else if let Some((yes, no)) = negative {
        let off = switch(key, &value, from, line)?;
        model.args.push(if off { dashed(no) } else { dashed(yes) });
    } else if PLAIN.contains(&key) {
        if switch(key, &value, from, line)? {
            model.args.push(dashed(key));
        } else {
            left.left(
                format!("model `{}`: `{key}` (line {line})", model.name),
                "it is off where it is left out",
            );
        }
    } else {
        model.args.extend([dashed(key), value]);
    }
    Ok(())
}

fn dashed(key: &str) -> String {
    let dash = if key.len() == 1 || SHORT.contains(&key) { "-" } else { "--" };
    format!("{dash}{key}")
}
