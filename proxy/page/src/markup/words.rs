//! Names memories, and gives each verdict its tone.

use warden_policies::MemoryKind;
use warden_policies::growth::GrowthVerdict;

use crate::markup::badge::BadgeTone;

/// Returns the tone of a verdict, which determines its colour and shape.
pub(crate) const fn verdict_tone(verdict: GrowthVerdict) -> BadgeTone {
    match verdict {
        GrowthVerdict::Warming => BadgeTone::Busy,
        GrowthVerdict::Steady | GrowthVerdict::Bounded => BadgeTone::Good,
        GrowthVerdict::Suspected => BadgeTone::Warn,
        GrowthVerdict::Leaking => BadgeTone::Bad,
    }
}

/// Names a kind of memory: `host memory`, `VRAM of GPU 0`.
pub(crate) fn memory_name(series: MemoryKind) -> String {
    match series {
        MemoryKind::Host => "host memory".to_owned(),
        MemoryKind::Vram(gpu) => format!("VRAM of GPU {}", gpu.0),
    }
}

/// Returns a text with a capital first letter.
pub(crate) fn capitalize(text: &str) -> String {
    let mut letters = text.chars();
    letters
        .next()
        .map_or_else(String::new, |first| first.to_uppercase().collect::<String>() + letters.as_str())
}
