//! `import` makes a configuration of ours of another program's, and says what has no equal.

use warden_rig::warden::SOON;
use warden_rig::{Home, Outcome};

const SWAP: &str = "apiKeys: [sk-0123456789abcdef]
models:
  small:
    cmd: /bin/true --port ${PORT} -m MODEL -c 2048
    unlisted: true
";

#[tokio::test]
async fn a_configuration_of_llama_swap_becomes_one_that_is_checked_and_never_over_another_file() -> Outcome {
    let home = Home::new()?;
    home.sample_model("small.gguf").await?;
    let model = home.path().join("small.gguf");
    home.file("swap.yaml", SWAP.replace("MODEL", &model.display().to_string()))?;
    let import = ["import", "swap.yaml", "-o", "warden.toml"];
    let ran = home.warden(&import, SOON).await?;
    assert!(ran.code == 0 && ran.stdout.is_empty(), "{ran:?}");
    assert!(ran.stderr.contains("1 model imported, 2 left without an equal"), "{ran:?}");
    assert!(ran.stderr.contains("`unlisted`") && !ran.stderr.contains("sk-0123"), "{ran:?}");
    let written = std::fs::read_to_string(home.path().join("warden.toml"))?;
    assert!(written.contains("# - model `small`: `unlisted`: ") && !written.contains("sk-0123"), "{written}");
    let ran = home.warden(&["plan", "--config", "warden.toml", "--gpus", "none"], SOON).await?;
    assert!(ran.code == 0 && ran.stdout.contains("it fits: small on the host"), "{ran:?}");

    let ran = home.warden(&import, SOON).await?;
    assert!(ran.code == 2 && ran.stderr.contains("nothing is overwritten"), "{ran:?}");
    assert_eq!(std::fs::read_to_string(home.path().join("warden.toml"))?, written);
    Ok(())
}

#[tokio::test]
async fn a_command_line_becomes_one_model_and_what_is_no_command_is_told() -> Outcome {
    let home = Home::new()?;
    let ran = home.warden(&["import", "--", "llama-server", "-hf", "org/a", "--port", "9000"], SOON).await?;
    assert!(ran.code == 0 && ran.stdout.contains("port = 9000\n"), "{ran:?}");
    assert!(ran.stdout.contains("[models.\"org/a\"]\nargs = [\"-hf\", \"org/a\"]\n"), "{ran:?}");
    home.file("run.sh", "llama-server -m 'a.gguf\n")?;
    for (words, told) in [
        (&["import"][..], "there is nothing to import"),
        (&["import", "gone.yaml"], "cannot read gone.yaml"),
        (&["import", "run.sh"], "line 1 of the command opens a quote"),
        (&["import", "run.sh", "--", "llama-server"], "both a file and a command"),
        (&["import", "--from", "ollama", "none"], "there are no models of Ollama"),
    ] {
        let ran = home.warden(words, SOON).await?;
        assert!(
            ran.code == 2 && ran.stderr.contains(told) && ran.stderr.contains("hint: "),
            "{told}: {ran:?}"
        );
    }
    Ok(())
}
