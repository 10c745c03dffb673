//! Saves and restores the checkpoints of slots, with the checkpoints of each era of llama-server.

use warden_patches::SetCatalogue;
use warden_rig::{Context as _, Outcome, Trouble};

use super::build::{self, Flavour};
use super::start;

/// Eras of a checkpoint's members, described in `tests/sidecar/checkpoints.cpp`.
const ERAS: [&str; 4] = ["FIRST", "COUNTED", "DRAFTED", "NOW"];

async fn play(
    era: &str,
    flavour: Flavour,
    scenario: &str,
    env: &[(&str, &str)],
) -> Result<Option<String>, Trouble> {
    let Some(program) = build::checkpoints(era, flavour).await? else { return Ok(None) };
    let title = format!("{scenario} of {era}, {flavour:?}");
    start(&program, &[scenario], env, title)?.succeeds().await.map(Some)
}

#[tokio::test]
async fn checkpoints_come_back_whole_or_not_at_all() -> Outcome {
    let catalogue = SetCatalogue::embedded()?;
    let set = catalogue.require("server")?;
    let scenarios = &set.conformance.as_ref().context("a program")?.scenarios;
    assert_eq!(scenarios.len(), 7);
    for era in ERAS {
        for scenario in scenarios {
            let env: Vec<(&str, &str)> =
                scenario.env.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
            for flavour in [Flavour::Plain, Flavour::Address] {
                let Some(output) = play(era, flavour, &scenario.id, &env).await? else { continue };
                let lines = output.matches("fix slot-checkpoints active: ").count();
                assert_eq!(lines, usize::from(!env.is_empty()), "{era} {}: {output}", scenario.id);
            }
        }
    }
    Ok(())
}

#[tokio::test]
async fn without_its_variable_or_with_a_wrong_one_checkpoints_are_left_alone() -> Outcome {
    const VARIABLE: &str = "LLAMA_WARDEN_SLOT_CHECKPOINTS";
    for (value, lines) in [("", 0), ("0", 0), ("yes", 1), ("-1", 1), ("1025", 1), ("8x", 1)] {
        let output =
            play("NOW", Flavour::Plain, "inert", &[(VARIABLE, value)]).await?.context("a program")?;
        assert_eq!(output.matches("llama-warden: ").count(), lines, "{value}: {output}");
        assert_eq!(output.contains("is ignored: expected 1 to 1024, or 0"), lines > 0, "{output}");
    }
    Ok(())
}

#[tokio::test]
async fn checkpoints_with_an_unknown_member_are_neither_saved_nor_restored() -> Outcome {
    let env = [("LLAMA_WARDEN_SLOT_CHECKPOINTS", "8")];
    let output = play("UNKNOWN", Flavour::Plain, "inert", &env).await?.context("a program")?;
    let said = "slot-checkpoints is ignored: in this version checkpoints have an unknown member";
    assert_eq!(output.matches(said).count(), 2, "{output}");
    Ok(())
}
