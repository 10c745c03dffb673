//! Matches observations of a server against known leaks, and suggests untried mitigations.
//!
//! A known build or backend without a leak rules the leak out; an unknown one makes the leak less likely. An
//! active mitigation rules out the leaks that it cures, and is never suggested again.

use serde::Serialize;

use super::catalogue::MitigationCatalogue;
use super::entry::{LeakMemory, MitigationAction, MitigationEntry};
use super::leak::{KnownLeak, LeakSign};
use crate::builds::{in_range, parse_build};
use crate::set::life::{FixStanding, LifeState};

/// Observations of a server.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ServerObservations {
    /// Memories that leak, or may leak.
    pub growing: Vec<LeakMemory>,
    /// Memories that were read and do not leak.
    pub stable: Vec<LeakMemory>,
    /// Blamed unit of work by its JSON name: `image`, `request`, …; `None` if none is blamed.
    pub unit: Option<String>,
    /// Requests contained images.
    pub images: bool,
    /// llama.cpp's build number, if known.
    pub build: Option<u32>,
    /// Compute backend, such as `cuda`, if known.
    pub backend: Option<String>,
    /// Arguments of the server.
    pub args: Vec<String>,
    /// Names of the server's environment variables.
    pub variables: Vec<String>,
    /// Ids of active mitigations.
    pub mitigations: Vec<String>,
    /// State of fixes by the server's source: needed, superseded, harmful.
    pub fix_states: Vec<(String, FixStanding)>,
}

/// A matching leak with suggestions.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LeakAdvice {
    /// Id of the leak.
    pub leak: String,
    /// Description in a line.
    pub title: String,
    /// Likelihood from 0 to 1.
    pub confidence: f64,
    /// Mitigations to try, best first.
    pub mitigations: Vec<String>,
    /// Mitigations that do not help in this build, each with the reason: superseded or harmful.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub not_here: Vec<String>,
    /// Other remedies in words.
    pub others: Vec<String>,
    /// Links to reports.
    pub references: Vec<String>,
}

const MAX_NAMED_MITIGATIONS: usize = 3;
/// Factor for a leak per request while no unit is blamed. If all requests are equal, growth per request
/// cannot be distinguished from growth per other unit.
const REQUEST_LEAK_FACTOR: f64 = 0.85;
/// Factor for a leak unrelated to images, if there were images.
const NON_IMAGE_LEAK_FACTOR: f64 = 0.6;
/// Factor for a leak by another unit while no unit is blamed.
const UNKNOWN_UNIT_FACTOR: f64 = 0.5;
/// Factor for a growing memory that the leak does not explain.
const UNEXPLAINED_GROWTH_FACTOR: f64 = 0.6;
/// Factor for an unknown build if the leak has a first build.
const UNKNOWN_BUILD_FACTOR: f64 = 0.8;
/// Factor for an unknown build if the leak has a last build: most users run newer builds.
const MAYBE_FIXED_FACTOR: f64 = 0.3;
const UNKNOWN_BACKEND_FACTOR: f64 = 0.8;
/// Factor for an unknown backend if the leak's backend is rare.
const RARE_BACKEND_FACTOR: f64 = 0.4;

impl LeakAdvice {
    fn likelihood(&self) -> &'static str {
        match self.confidence {
            0.7.. => "likely",
            0.4.. => "possible",
            _ => "a guess",
        }
    }

    /// The advice as a sentence.
    pub fn sentence(&self) -> String {
        let tries: Vec<String> =
            self.mitigations.iter().take(MAX_NAMED_MITIGATIONS).map(|id| format!("`{id}`")).collect();
        let tries = (!tries.is_empty()).then(|| format!(": try {}", tries.join(" or ")));
        let others = self.others.iter().map(|other| format!("; {other}"));
        // Explain why nothing is left to try.
        let none = self.mitigations.is_empty().then_some(&self.not_here);
        let others = others.chain(none.into_iter().flatten().map(|why| format!("; {why}")));
        let see = self.references.first().map(|reference| format!(", see {reference}"));
        let rest: String = tries.into_iter().chain(others).chain(see).collect();
        format!("{} (`{}`, {}){rest}", self.title, self.leak, self.likelihood())
    }
}

impl MitigationCatalogue {
    /// Leaks that match the observations, the likeliest first.
    pub fn advise(&self, seen: &ServerObservations) -> Vec<LeakAdvice> {
        if seen.growing.is_empty() {
            return Vec::new();
        }
        let mut all: Vec<LeakAdvice> =
            self.leaks().iter().filter_map(|leak| self.match_leak(leak, seen)).collect();
        all.sort_by(|a, b| b.confidence.total_cmp(&a.confidence));
        all
    }

    fn match_leak(&self, leak: &KnownLeak, seen: &ServerObservations) -> Option<LeakAdvice> {
        let best = leak.signs.iter().filter_map(|sign| self.match_sign(leak, sign, seen));
        let confidence = best.max_by(f64::total_cmp)?;
        let mut advice = LeakAdvice {
            leak: leak.id.clone(),
            title: leak.title.clone(),
            confidence: (confidence * 100.0).round() / 100.0,
            mitigations: Vec::new(),
            not_here: Vec::new(),
            others: Vec::new(),
            references: leak.references.clone(),
        };
        for cure in &leak.cures {
            if let Some(id) = &cure.mitigation {
                // A program with other patch sets may lack the mitigation.
                let Some(entry) = self.mitigation(id) else { continue };
                let fits = seen.backend.as_ref().is_none_or(|backend| entry.is_for(backend));
                let life =
                    entry.state_in(seen.build, &seen.fix_states).filter(|life| life.is != LifeState::Needed);
                if let Some(life) = life.filter(|_| fits) {
                    let why = format!("`{id}` is {} in this build: {}", life.is.name(), life.reason());
                    advice.not_here.push(why);
                } else if fits && !is_active(entry, seen) {
                    advice.mitigations.push(id.clone());
                }
            } else if let Some(build) = &cure.upgrade {
                let has = seen.build.zip(parse_build(build)).is_some_and(|(own, first)| own >= first);
                if !has {
                    advice.others.push(cure.to_string());
                }
            } else if cure.advice.is_some() {
                advice.others.push(cure.to_string());
            }
        }
        Some(advice)
    }

    /// Likelihood of the leak by one of its signs; `None` if excluded.
    fn match_sign(&self, leak: &KnownLeak, sign: &LeakSign, seen: &ServerObservations) -> Option<f64> {
        let excluded = !sign.grows.iter().all(|memory| seen.growing.contains(memory))
            || sign.still.iter().any(|memory| seen.growing.contains(memory))
            || seen.backend.as_ref().is_some_and(|backend| !leak.is_for(backend))
            || seen.build.is_some_and(|build| !in_range(build, &leak.first, &leak.last))
            || sign.unless.iter().filter_map(|id| self.mitigation(id)).any(|entry| is_active(entry, seen))
            || !(sign.flags.is_empty() || sign.flags.iter().any(|flag| is_given(flag, &seen.args)));
        if excluded {
            return None;
        }
        let mut confidence = sign.confidence;
        match &seen.unit {
            Some(unit) if !sign.units.is_empty() && !sign.units.contains(unit) => return None,
            None if !sign.units.is_empty() => confidence *= unblamed_factor(sign, seen.images)?,
            Some(_) | None => {}
        }
        if seen.growing.iter().any(|memory| !sign.grows.contains(memory)) {
            confidence *= UNEXPLAINED_GROWTH_FACTOR;
        }
        if seen.build.is_none() {
            confidence *= match (parse_build(&leak.first), parse_build(&leak.last)) {
                (_, Some(_)) => MAYBE_FIXED_FACTOR,
                (Some(_), None) => UNKNOWN_BUILD_FACTOR,
                (None, None) => 1.0,
            };
        }
        if seen.backend.is_none() && !leak.backends.is_empty() {
            confidence *= if leak.is_for("cuda") { UNKNOWN_BACKEND_FACTOR } else { RARE_BACKEND_FACTOR };
        }
        Some(confidence)
    }
}

/// Factor for a sign with units while no unit is blamed; `None` for a leak by images if there were none.
fn unblamed_factor(sign: &LeakSign, images: bool) -> Option<f64> {
    let has = |name: &str| sign.units.iter().any(|unit| unit == name);
    match (has("image"), has("request")) {
        (true, false) if !images => None,
        (true, _) if images => Some(1.0),
        (_, true) => Some(if images { NON_IMAGE_LEAK_FACTOR } else { REQUEST_LEAK_FACTOR }),
        _ => Some(UNKNOWN_UNIT_FACTOR),
    }
}

fn is_given(flag: &str, args: &[String]) -> bool {
    let words: Vec<&str> = flag.split(' ').collect();
    args.windows(words.len()).any(|given| given == words)
}

/// Returns true if a mitigation is active in a server, however it was configured.
fn is_active(entry: &MitigationEntry, seen: &ServerObservations) -> bool {
    let variable = |name: &String| seen.variables.contains(name);
    let listed = seen.mitigations.contains(&entry.id);
    listed
        || match &entry.action {
            MitigationAction::Patch { variable: name, .. } => name.as_ref().is_some_and(variable),
            MitigationAction::Variable { name, .. } => variable(name),
            MitigationAction::Flags { flags } => flags.iter().any(|flag| {
                flag.variables.iter().any(variable) || seen.args.iter().any(|word| flag.names.contains(word))
            }),
            MitigationAction::Unset { .. } | MitigationAction::BuildOption { .. } => false,
        }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn images() -> ServerObservations {
        ServerObservations {
            growing: vec![LeakMemory::Host, LeakMemory::Vram],
            unit: Some("image".to_owned()),
            build: Some(8827),
            backend: Some("cuda".to_owned()),
            ..ServerObservations::default()
        }
    }

    fn advise(seen: &ServerObservations) -> Vec<LeakAdvice> {
        MitigationCatalogue::embedded().unwrap().advise(seen)
    }

    #[test]
    fn growth_per_image_with_graphs_on_is_the_graph_cache() {
        let told = advise(&images());
        assert_eq!(told[0].leak, "cuda-graph-map-unbounded", "{told:?}");
        assert_eq!(told[0].likelihood(), "likely");
        assert_eq!(told[0].mitigations[..2], ["graph-cache-cap", "no-cuda-graphs"]);
        let sentence = told[0].sentence();
        assert!(sentence.contains("try `graph-cache-cap` or `no-cuda-graphs`"), "{sentence}");
        assert!(sentence.contains("see ggml-org/llama.cpp#"), "{sentence}");
        let newer = advise(&ServerObservations { build: Some(10_587), ..images() });
        assert_eq!(newer[0].leak, "cuda-graph-window", "{newer:?}");
    }

    #[test]
    fn what_is_already_in_place_is_not_advised_and_rules_its_leak_out() {
        for seen in [
            ServerObservations { variables: vec!["GGML_CUDA_DISABLE_GRAPHS".to_owned()], ..images() },
            ServerObservations { mitigations: vec!["graph-cache-cap".to_owned()], ..images() },
        ] {
            let told = advise(&seen);
            assert!(!told.iter().any(|advice| advice.leak.starts_with("cuda-graph")), "{told:?}");
        }
        let cached = ServerObservations {
            growing: vec![LeakMemory::Host],
            stable: vec![LeakMemory::Vram],
            ..ServerObservations::default()
        };
        assert!(advise(&cached).iter().any(|advice| advice.leak == "prompt-cache-ram"));
        let bounded = ServerObservations { args: vec!["-cram".to_owned(), "512".to_owned()], ..cached };
        assert!(!advise(&bounded).iter().any(|advice| advice.leak == "prompt-cache-ram"));
    }

    #[test]
    fn a_build_or_a_backend_without_the_leak_rules_it_out_and_an_unknown_one_makes_it_less_likely() {
        let cpu = advise(&ServerObservations {
            backend: Some("cpu".to_owned()),
            growing: vec![LeakMemory::Host],
            ..images()
        });
        assert!(!cpu.iter().any(|advice| advice.leak.contains("cuda")), "{cpu:?}");
        let known = advise(&images())[0].confidence;
        let unknown = advise(&ServerObservations { build: None, backend: None, unit: None, ..images() });
        let same = unknown.iter().find(|advice| advice.leak == "cuda-graph-map-unbounded").unwrap();
        assert!(same.confidence < known && same.confidence > 0.0, "{unknown:?}");
        assert!(advise(&ServerObservations { growing: Vec::new(), ..images() }).is_empty());
        let blind = |images| {
            let told = advise(&ServerObservations {
                images,
                unit: None,
                growing: vec![LeakMemory::Host],
                stable: vec![LeakMemory::Vram],
                ..ServerObservations::default()
            });
            told.into_iter().map(|advice| (advice.leak, advice.confidence)).collect::<Vec<_>>()
        };
        let of = |all: &[(String, f64)], leak: &str| {
            all.iter().find(|(own, _)| own == leak).map(|(_, sure)| *sure)
        };
        let (without, with) = (blind(false), blind(true));
        assert!(of(&with, "prompt-cache-ram") < of(&without, "prompt-cache-ram"), "{with:?}");
        assert!(of(&with, "cuda-graph-window") > of(&without, "cuda-graph-window"), "{with:?}");
        assert_eq!(of(&without, "mtmd-chunk-leak"), None, "no image, no leak by images");
    }

    #[test]
    fn a_sign_with_a_flag_and_its_value_fits_no_other_value_of_that_flag() {
        let growing = |args: &[&str]| {
            let seen = ServerObservations {
                growing: vec![LeakMemory::Host],
                stable: vec![LeakMemory::Vram],
                unit: Some("output_token".to_owned()),
                build: Some(9279),
                backend: Some("cuda".to_owned()),
                args: args.iter().map(|&word| word.to_owned()).collect(),
                ..ServerObservations::default()
            };
            advise(&seen).iter().any(|advice| advice.leak == "tensor-split-context")
        };
        assert!(growing(&["-ngl", "99", "-sm", "tensor"]) && growing(&["--split-mode", "tensor"]));
        assert!(!growing(&["-sm", "layer"]) && !growing(&["-sm", "none", "-a", "tensor"]) && !growing(&[]));
    }
}
