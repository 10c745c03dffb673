//! Explains the terms on the pages, in a sentence each, so that all pages explain them alike.

use warden_policies::MemoryKind;
use warden_policies::growth::GrowthVerdict;

use crate::badge::BadgeTone;

/// All verdicts, the mildest first.
pub const ALL_VERDICTS: [GrowthVerdict; 5] = [
    GrowthVerdict::Warming,
    GrowthVerdict::Steady,
    GrowthVerdict::Bounded,
    GrowthVerdict::Suspected,
    GrowthVerdict::Leaking,
];

/// Explains a verdict in a sentence.
pub const fn explain_verdict(verdict: GrowthVerdict) -> &'static str {
    match verdict {
        GrowthVerdict::Warming => {
            "Too little work was done to say anything, or the growth of the start is not over yet."
        }
        GrowthVerdict::Steady => "It does not grow with the work that is done.",
        GrowthVerdict::Bounded => "It grows within the declared caches, and ends when those are full.",
        GrowthVerdict::Suspected => "It grows with the work; more work is needed before it is called a leak.",
        GrowthVerdict::Leaking => {
            "It keeps growing with the work, beyond the declared caches, without a sign of an end."
        }
    }
}

/// Returns the tone of a verdict, which determines its colour and shape.
pub const fn verdict_tone(verdict: GrowthVerdict) -> BadgeTone {
    match verdict {
        GrowthVerdict::Warming => BadgeTone::Busy,
        GrowthVerdict::Steady | GrowthVerdict::Bounded => BadgeTone::Good,
        GrowthVerdict::Suspected => BadgeTone::Warn,
        GrowthVerdict::Leaking => BadgeTone::Bad,
    }
}

/// Names a kind of memory: `host memory`, `VRAM of GPU 0`.
pub fn memory_name(series: MemoryKind) -> String {
    match series {
        MemoryKind::Host => "host memory".to_owned(),
        MemoryKind::Vram(gpu) => format!("VRAM of GPU {}", gpu.0),
    }
}

/// Terms of plots, by their names in the legends, with explanations.
pub const PLOT_TERMS: [(&str, &str); 5] = [
    ("law", "Growth with the work, as the detector finds it in the readings, with its range."),
    (
        "declared",
        "Caches and checkpoints that the server is configured to keep: growth within them is no leak.",
    ),
    ("soft budget", "Beyond it the process is replaced in a quiet moment."),
    ("hard budget", "Beyond it the process is drained and replaced at once."),
    (
        "forecast",
        "When a budget is reached if growth continues like this, with the earliest and the latest moment.",
    ),
];

/// Returns a text with a capital first letter.
pub fn capitalize(text: &str) -> String {
    let mut letters = text.chars();
    letters
        .next()
        .map_or_else(String::new, |first| first.to_uppercase().collect::<String>() + letters.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_verdict_has_a_sentence_of_its_own() {
        let mut all = ALL_VERDICTS.map(explain_verdict);
        all.sort_unstable();
        assert!(all.windows(2).all(|two| two[0] != two[1]));
        assert!(all.iter().all(|text| text.ends_with('.') && text.len() < 130));
    }
}
