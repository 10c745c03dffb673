//! The shipped configuration is valid for an endpoint picker. No picker is available to tests, so its rules
//! are repeated here: its parser, which refuses unknown fields, and its checks of plugins. Source:
//! llm-d-router's `apix/config/v1alpha1` and `pkg/epp/config/loader`, 2026.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;
use serde_json::Value;
use warden_rig::{Context as _, Outcome, Trouble};

/// The whole file; parts that we do not use may have any form.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct File {
    api_version: String,
    kind: String,
    plugins: Vec<Plugin>,
    scheduling_profiles: Vec<Profile>,
    #[serde(default)]
    feature_gates: Vec<String>,
    #[serde(default)]
    data_layer: Option<DataLayer>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Plugin {
    #[serde(default)]
    name: Option<String>,
    r#type: String,
    #[serde(default)]
    parameters: Option<Value>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Profile {
    name: String,
    plugins: Vec<Used>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Used {
    plugin_ref: String,
    #[serde(default)]
    weight: Option<f64>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct DataLayer {
    #[serde(default)]
    sources: Vec<Source>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Source {
    plugin_ref: String,
    extractors: Vec<Used>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Extractor {
    #[serde(default = "vllm")]
    default_engine: String,
    #[serde(default)]
    engine_configs: Vec<Engine>,
    #[serde(default, rename = "engineLabelKey")]
    _label: String,
}

fn vllm() -> String {
    "vllm".to_owned()
}

/// Metrics by purpose; an empty name is not read.
#[derive(Deserialize)]
struct Engine {
    name: String,
    #[serde(flatten)]
    specs: BTreeMap<String, String>,
}

const SPECS: [&str; 9] = [
    "queuedRequestsSpec",
    "runningRequestsSpec",
    "kvUsageSpec",
    "loraSpec",
    "cacheInfoSpec",
    "cacheBlockSizeLabelName",
    "cacheNumBlocksLabelName",
    "cacheBlockSizeSpec",
    "cacheNumBlocksSpec",
];

/// Effect of a plugin type; only types that we use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Does {
    Scores,
    Picks,
    Handles,
    Reads,
    Extracts,
}

fn does(kind: &str) -> Result<Does, Trouble> {
    Ok(match kind {
        "queue-scorer" | "kv-cache-utilization-scorer" | "prefix-cache-scorer" | "lora-affinity-scorer" => {
            Does::Scores
        }
        "max-score-picker" => Does::Picks,
        "single-profile-handler" => Does::Handles,
        "metrics-data-source" => Does::Reads,
        "core-metrics-extractor" => Does::Extracts,
        _ => return Err(Trouble::new(format!("no plugin of type {kind} is known here"))),
    })
}

fn require(holds: bool, why: impl FnOnce() -> String) -> Outcome {
    if holds { Ok(()) } else { Err(Trouble::new(why())) }
}

fn check(text: &str) -> Outcome {
    let file: File = serde_norway::from_str(text)?;
    require(file.api_version == "llm-d.ai/v1alpha1", || format!("apiVersion: {}", file.api_version))?;
    require(file.kind == "EndpointPickerConfig", || format!("kind: {}", file.kind))?;
    require(file.feature_gates.is_empty(), || "gates come and go: none is to be needed".to_owned())?;
    let mut plugins = BTreeMap::new();
    for plugin in &file.plugins {
        let name = plugin.name.as_ref().unwrap_or(&plugin.r#type);
        let does = does(&plugin.r#type)?;
        require(plugins.insert(name.clone(), does).is_none(), || format!("two plugins are called {name}"))?;
        match (&plugin.parameters, does) {
            (Some(parameters), Does::Extracts) => extractor(parameters)?,
            (parameters, _) => require(parameters.is_none(), || format!("parameters of {name}"))?,
        }
    }
    let of = |name: &str| plugins.get(name).copied().context(format!("no plugin is called {name}"));
    let count = |wanted: Does| plugins.values().filter(|does| **does == wanted).count();
    require(count(Does::Handles) <= 1, || "more than one handles profiles".to_owned())?;
    require(file.scheduling_profiles.len() == 1, || "one handler of one profile".to_owned())?;
    for profile in &file.scheduling_profiles {
        require(!profile.name.is_empty(), || "a profile without a name".to_owned())?;
        let (mut seen, mut pickers) = (BTreeSet::new(), 0);
        for used in &profile.plugins {
            let (name, does) = (&used.plugin_ref, of(&used.plugin_ref)?);
            require(seen.insert(name), || format!("{name} is there twice"))?;
            pickers += usize::from(does == Does::Picks);
            let is_fit = match does {
                Does::Scores => used.weight.is_none_or(|weight| weight.is_finite() && weight > 0.0),
                Does::Picks => used.weight.is_none(),
                Does::Handles | Does::Reads | Does::Extracts => false,
            };
            require(is_fit, || format!("{name} is no plugin of a profile, or has such a weight"))?;
        }
        require(pickers <= 1, || "more than one picks".to_owned())?;
    }
    // Without a source of metrics, the picker uses its own, with the extractor named like its type.
    let sources = file.data_layer.map(|layer| layer.sources).unwrap_or_default();
    let mut extracts = sources.is_empty() && plugins.get("core-metrics-extractor") == Some(&Does::Extracts);
    for source in &sources {
        require(of(&source.plugin_ref)? == Does::Reads, || format!("{} reads nothing", source.plugin_ref))?;
        for used in &source.extractors {
            require(of(&used.plugin_ref)? == Does::Extracts, || {
                format!("{} extracts nothing", used.plugin_ref)
            })?;
            extracts = true;
        }
    }
    require(extracts, || "nobody reads our metrics".to_owned())
}

fn extractor(parameters: &Value) -> Outcome {
    let own = Extractor::deserialize(parameters)?;
    let mut names = BTreeSet::new();
    for Engine { name, specs } in &own.engine_configs {
        require(!name.is_empty() && name != "default", || format!("an engine cannot be called {name:?}"))?;
        require(names.insert(name), || format!("two engines are called {name}"))?;
        for (key, spec) in specs {
            require(SPECS.contains(&key.as_str()), || format!("{name} has {key}"))?;
            // A Prometheus name, perhaps with labels in braces.
            let metric = spec.split_once('{').map_or(spec.as_str(), |(metric, _)| metric);
            let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | ':');
            require(metric.chars().all(is_name), || format!("{key} of {name} is {spec}"))?;
        }
    }
    require(names.contains(&own.default_engine), || format!("no engine is called {}", own.default_engine))
}

#[test]
fn a_picker_takes_the_shipped_configuration() -> Outcome {
    check(&super::manifests::read("many/epp-config.yaml")?)
}

#[test]
fn what_a_picker_refuses_is_refused_here() -> Outcome {
    let shipped = super::manifests::read("many/epp-config.yaml")?;
    for (have, instead) in [
        ("kind: EndpointPickerConfig", "kind: PickerConfig"),
        ("llm-d.ai/v1alpha1", "llm-d.ai/v2"),
        ("defaultEngine: llama-warden", "defaultEngine: llama"),
        ("kvUsageSpec", "kvCacheUsageSpec"),
        ("kvUsageSpec: llama_warden_pool_kv_usage", "kvUsageSpec: llama-warden.pool"),
        ("        - name: llama-warden", "        - name: default"),
        ("engineConfigs", "engines"),
        ("- type: max-score-picker", "- type: best-score-picker"),
        ("- type: max-score-picker", "- pluginName: max-score-picker"),
        ("pluginRef: queue-scorer", "pluginRef: queue"),
        ("pluginRef: queue-scorer", "pluginRef: prefix-cache-scorer"),
        ("pluginRef: queue-scorer", "pluginRef: single-profile-handler"),
        ("weight: 3", "weight: heavy"),
        ("weight: 3", "weight: -3"),
        ("weight: 3", "weigth: 3"),
        ("- type: core-metrics-extractor", "- type: core-metrics-extractor\n    name: mine"),
        ("schedulingProfiles:", "featureGates: [flowControl]\nschedulingProfiles:"),
        ("schedulingProfiles:", "profiles:"),
    ] {
        assert!(shipped.contains(have), "{have} is not in the file");
        let text = shipped.replacen(have, instead, 1);
        assert!(check(&text).is_err(), "{instead} was taken");
    }
    Ok(())
}
