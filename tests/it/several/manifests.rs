//! The manifests of docs/kubernetes are consistent, valid for Kubernetes, and contain a valid configuration.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;
use warden_rig::{Context as _, Home, Outcome, Trouble};

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/kubernetes");

pub(super) fn read(file: &str) -> Result<String, Trouble> {
    Ok(std::fs::read_to_string(Path::new(FOLDER).join(file))?)
}

fn yaml(file: &str) -> Result<Value, Trouble> {
    Ok(serde_norway::from_str(&read(file)?)?)
}

fn time(config: &toml::Table, path: [&str; 2]) -> Result<Duration, Trouble> {
    let mut value = config.get(path[0]).context(path[0])?;
    for key in path[1].split('.') {
        value = value.get(key).context(format!("{path:?}"))?;
    }
    let text = value.as_str().context(format!("{path:?}"))?;
    Ok(warden_policies::defaults::parse_duration(text)?)
}

#[test]
fn the_graceful_times_add_up() -> Outcome {
    let config: toml::Table = toml::from_str(&read("base/warden.toml")?)?;
    let delay = time(&config, ["probe", "drain_delay"])?;
    let deadline = time(&config, ["server", "shutdown_deadline"])?;
    let grace = time(&config, ["defaults", "lifecycle.stop_grace"])?;
    let pod = &yaml("base/deployment.yaml")?["spec"]["template"]["spec"];
    let given = Duration::from_secs(pod["terminationGracePeriodSeconds"].as_u64().context("no grace")?);
    assert!(given >= delay + deadline + grace + Duration::from_secs(10), "{given:?}");
    let container = &pod["containers"][0];
    let ready = &container["readinessProbe"];
    let number = |probe: &Value, key: &str| probe[key].as_u64().context(key.to_owned());
    let noticed = number(ready, "periodSeconds")? * number(ready, "failureThreshold")?
        + number(ready, "timeoutSeconds")?;
    assert!(delay >= Duration::from_secs(2 * noticed), "others notice within {noticed} s, half of {delay:?}");
    for probe in ["livenessProbe", "readinessProbe", "startupProbe"] {
        assert_eq!(container[probe]["httpGet"]["port"], "probe", "{probe}");
    }
    assert_eq!(container["livenessProbe"]["httpGet"]["path"], "/livez");
    assert_eq!(container["readinessProbe"]["httpGet"]["path"], "/readyz");
    let port = |name: &str| {
        let all = container["ports"].as_array().into_iter().flatten();
        all.filter(|port| port["name"] == name).find_map(|port| port["containerPort"].as_u64())
    };
    assert_eq!((port("http"), port("probe")), (Some(8080), Some(8081)));
    assert_eq!(config["probe"]["address"].as_str(), Some("0.0.0.0:8081"));
    assert_eq!(config["server"]["port"].as_integer(), Some(8080));
    Ok(())
}

#[test]
fn what_a_picker_is_told_to_scrape_is_what_is_exported() -> Outcome {
    let picker = yaml("many/epp-config.yaml")?;
    let engine = &picker["plugins"][0]["parameters"]["engineConfigs"][0];
    let exported = std::fs::read_to_string(Path::new(FOLDER).join("../metrics.md"))?;
    for spec in ["queuedRequestsSpec", "runningRequestsSpec", "kvUsageSpec", "loraSpec", "cacheInfoSpec"] {
        let name = engine[spec].as_str().context(spec)?;
        assert!(exported.contains(&format!("| `{name}` | gauge |")), "{name}");
    }
    Ok(())
}

/// The image has llama-server in its user's data directory, which no volume may hide. The pod must run as
/// that user.
#[test]
fn nothing_is_mounted_over_the_builds_of_the_image() -> Outcome {
    let recipe = std::fs::read_to_string(Path::new(FOLDER).join("../../packaging/Containerfile"))?;
    let data = recipe.split_once("XDG_DATA_HOME=").context("no data directory")?.1;
    let builds = Path::new(data.split_whitespace().next().context("no folder")?).join("llama-warden/builds");
    let pod = &yaml("base/deployment.yaml")?["spec"]["template"]["spec"];
    let mounts = pod["containers"][0]["volumeMounts"].as_array().context("no mounts")?;
    assert!(mounts.len() > 3, "{mounts:?}");
    for mount in mounts {
        let path = mount["mountPath"].as_str().context("a mount without a path")?;
        assert!(!builds.starts_with(path), "{path} hides {}", builds.display());
        let volume = mount["name"].as_str().context("a mount without a name")?;
        let volumes = pod["volumes"].as_array().context("no volumes")?;
        assert!(volumes.iter().any(|known| known["name"] == volume), "{volume}");
    }
    let user = &pod["securityContext"]["runAsUser"];
    assert!(
        recipe.contains(&format!("--uid {user} --gid {}", pod["securityContext"]["runAsGroup"])),
        "{user}"
    );
    Ok(())
}

#[tokio::test]
async fn its_configuration_is_one_that_is_taken() -> Outcome {
    let home = Home::new()?;
    let models = home.path().join("models");
    std::fs::create_dir_all(&models)?;
    std::fs::write(models.join("m.gguf"), "GGUF")?;
    let place = home.path().display();
    let text = read("base/warden.toml")?
        .replace("\"/models\"", &format!("\"{place}/models\""))
        .replace("\"/var/lib/llama-warden", &format!("\"{place}/lib"))
        .replace("\"/run/llama-warden\"", &format!("\"{place}/run\""));
    let file = home.file("warden.toml", text)?.display().to_string();
    let ran = home.warden(&["config", "show", "--config", &file], warden_rig::warden::SOON).await?;
    assert!(ran.code == 0 && ran.stdout.contains("drain_delay = \"15s\""), "{ran:?}");
    Ok(())
}

/// `kubernetes-validate` of PyPI has the schemas; `.ci/run` installs it and sets the variable.
#[tokio::test]
async fn kubernetes_takes_what_is_shipped() -> Outcome {
    let Some(program) = std::env::var_os("WARDEN_TEST_KUBERNETES").map(PathBuf::from) else {
        eprintln!("skipped: WARDEN_TEST_KUBERNETES names no kubernetes-validate");
        return Ok(());
    };
    let files = [
        "base/namespace.yaml",
        "base/models.yaml",
        "base/deployment.yaml",
        "base/service.yaml",
        "many/disruption.yaml",
    ];
    let mut command = tokio::process::Command::new(program);
    command.arg("--strict").args(files).current_dir(FOLDER).kill_on_drop(true);
    let ran = command.output().await?;
    let said = String::from_utf8_lossy(&[ran.stdout, ran.stderr].concat()).into_owned();
    assert!(ran.status.success(), "{said}");
    Ok(())
}
