//! Checks the shipped dashboard and alerts: llama-warden exports each of their metrics.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::Value;
use warden_rig::{Context as _, Outcome, Trouble};

pub(super) const ALERTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/prometheus/alerts.yml");
pub(super) const ALERTS_TEST: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/prometheus/alerts_test.yml");
const DASHBOARD: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/grafana/llama-warden.json");
const METRICS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/metrics.md");
const DOCS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

fn dashboard() -> Result<Value, Trouble> {
    Ok(serde_json::from_str(&std::fs::read_to_string(DASHBOARD)?)?)
}

pub(super) fn panels() -> Result<Vec<Value>, Trouble> {
    let dashboard = dashboard()?;
    let all = dashboard["panels"].as_array().context("no panels")?;
    Ok(all.iter().filter(|panel| panel["type"] != "row").cloned().collect())
}

/// Expressions of a panel, with every value selected.
pub(super) fn queries(panel: &Value) -> Vec<String> {
    let targets = panel["targets"].as_array().into_iter().flatten();
    targets.filter_map(|target| target["expr"].as_str()).map(chosen).collect()
}

fn chosen(expression: &str) -> String {
    let all = expression.replace("$model", ".*").replace("$instance", ".*");
    all.replace("$__rate_interval", "30s").replace("$__interval", "15s")
}

pub(super) fn annotations() -> Result<Vec<String>, Trouble> {
    let dashboard = dashboard()?;
    let all = dashboard["annotations"]["list"].as_array().context("no annotations")?;
    Ok(all.iter().filter_map(|one| one["expr"].as_str()).map(chosen).collect())
}

pub(super) fn alerts() -> Result<Vec<(String, String)>, Trouble> {
    let text = std::fs::read_to_string(ALERTS)?;
    let all = text.split("      - alert: ").skip(1);
    Ok(all.filter_map(|alert| alert.split_once('\n').map(|(a, b)| (a.to_owned(), b.to_owned()))).collect())
}

fn named(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    words.filter(|word| word.starts_with("llama_warden_")).map(str::to_owned).collect()
}

/// Exported names, from the documentation's table, which the code generates. A histogram has three.
fn exported() -> Result<BTreeSet<String>, Trouble> {
    let text = std::fs::read_to_string(METRICS)?;
    let mut all = BTreeSet::new();
    for line in text.lines() {
        let Some((name, rest)) = line.strip_prefix("| `").and_then(|line| line.split_once("` | ")) else {
            continue;
        };
        if !name.starts_with("llama_warden_") {
            continue;
        }
        if rest.starts_with("histogram") {
            all.extend(["bucket", "sum", "count"].map(|part| format!("{name}_{part}")));
        }
        all.insert(name.to_owned());
    }
    assert!(all.len() > 80, "{all:?}");
    Ok(all)
}

#[test]
fn every_metric_in_the_dashboard_and_the_alerts_is_one_that_is_exported() -> Outcome {
    let exported = exported()?;
    for file in [DASHBOARD, ALERTS, ALERTS_TEST] {
        let named = named(&std::fs::read_to_string(file)?);
        let unknown: Vec<&String> = named.difference(&exported).collect();
        assert!(unknown.is_empty() && !named.is_empty(), "{file}: {unknown:?}");
    }
    Ok(())
}

#[test]
fn the_dashboard_is_one_that_grafana_can_import() -> Outcome {
    let dashboard = dashboard()?;
    let all = dashboard["panels"].as_array().context("no panels")?;
    let (mut ids, mut titles, mut places) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    for panel in all {
        let title = panel["title"].as_str().context("a panel without a title")?;
        assert!(ids.insert(panel["id"].as_u64().context("no id")?), "{title}: its id is another's");
        assert!(titles.insert(title), "two panels are called {title}");
        let place = |key: &str| panel["gridPos"][key].as_u64().context(format!("{title} has no {key}"));
        let (x, y, w, h) = (place("x")?, place("y")?, place("w")?, place("h")?);
        assert!(x + w <= 24, "{title} is wider than the page");
        for (x, y) in (x..x + w).flat_map(|x| (y..y + h).map(move |y| (x, y))) {
            assert!(places.insert((x, y)), "{title} lies over another one");
        }
        if panel["type"] == "row" {
            continue;
        }
        let description = panel["description"].as_str().unwrap_or_default();
        assert!(description.ends_with('.'), "{title}: {description:?}");
        assert!(!panel["fieldConfig"]["defaults"]["unit"].as_str().unwrap_or_default().is_empty(), "{title}");
        assert_eq!(panel["datasource"]["uid"], "${datasource}", "{title}");
        let refs: BTreeSet<&str> = panel["targets"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|target| target["refId"].as_str())
            .collect();
        assert!(!refs.is_empty() && refs.len() == queries(panel).len(), "{title}: {refs:?}");
        for expression in queries(panel) {
            assert!(!expression.contains('$'), "{title}: {expression}");
        }
    }
    let names: Vec<&str> = dashboard["templating"]["list"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|variable| variable["name"].as_str())
        .collect();
    assert_eq!(names, ["datasource", "instance", "model"]);
    Ok(())
}

#[test]
fn every_alert_says_how_bad_it_is_and_where_to_read_what_to_do() -> Outcome {
    let alerts = alerts()?;
    let tests = std::fs::read_to_string(ALERTS_TEST)?;
    assert!(alerts.len() > 15, "{}", alerts.len());
    for (name, text) in alerts {
        let has = |key: &str| text.contains(&format!("\n          {key}: "));
        assert!(has("summary") && has("description"), "{name}");
        assert!(
            ["critical", "warning", "info"]
                .iter()
                .any(|severity| text.contains(&format!("{{ severity: {severity} }}"))),
            "{name}"
        );
        let runbook = text.split_once("runbook: ").and_then(|(_, rest)| rest.lines().next());
        let (file, anchor) = runbook.and_then(|place| place.split_once('#')).context(name.clone())?;
        let page = std::fs::read_to_string(Path::new(DOCS).join(file))?;
        let anchors: Vec<String> = page
            .lines()
            .filter_map(|line| line.strip_prefix("##"))
            .map(|line| slug(line.trim_start_matches('#')))
            .collect();
        assert!(anchors.iter().any(|have| have == anchor), "{name}: {file} has no #{anchor}: {anchors:?}");
        for case in ["fires", "is quiet"] {
            assert!(
                tests.contains(&format!("  - name: {name} {case}\n")),
                "{name} has no test in which it {case}"
            );
        }
    }
    Ok(())
}

fn slug(heading: &str) -> String {
    let kept = heading.trim().to_lowercase();
    kept.chars()
        .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'))
        .map(|c| if c == ' ' { '-' } else { c })
        .collect()
}
