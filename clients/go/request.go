package mlxstream

import (
	v1 "github.com/mlx-stream/mlx-stream/clients/go/v1"
)

// Options say how to generate; see options.proto. What is nil is the model's default. [proto.Uint32] and its kin make
// pointers: &mlxstream.Options{MaxTokens: proto.Uint32(60)}.
//
// [proto.Uint32]: https://pkg.go.dev/google.golang.org/protobuf/proto#Uint32
type Options = v1.GenerateOptions

// Delivery says how to deliver; see delivery.proto.
type Delivery = v1.DeliveryOptions

// Request describes one generation. Only Prompt is required.
type Request struct {
	// Prompt is what to continue: [Text], [Tokens] or [Chat].
	Prompt Prompt
	// Options say how to generate; nil means the model's defaults.
	Options *Options
	// Delivery says how to deliver; nil means the server's defaults.
	Delivery *Delivery
	// Model names the model; "" means the served one.
	Model string
	// RequestID is a name for [Client.Abort]; "" lets the server choose.
	RequestID string
}

// Prompt is what a generation continues.
type Prompt struct {
	holder *v1.GenerateRequest // of which only the prompt is set
}

// Text is a prompt of raw text.
func Text(text string) Prompt {
	return Prompt{&v1.GenerateRequest{Prompt: &v1.GenerateRequest_Text{Text: &v1.TextPrompt{Text: text}}}}
}

// Tokens is a prompt of token ids, used exactly as they are.
func Tokens(ids ...uint32) Prompt {
	return Prompt{&v1.GenerateRequest{Prompt: &v1.GenerateRequest_Tokens{Tokens: &v1.TokenPrompt{Ids: ids}}}}
}

// Chat is a conversation for the model's chat template, oldest turn first.
func Chat(messages ...*v1.ChatMessage) Prompt { return ChatPrompt(&v1.ChatPrompt{Messages: messages}) }

// ChatPrompt is a conversation with settings of its own, such as tools.
func ChatPrompt(prompt *v1.ChatPrompt) Prompt {
	return Prompt{&v1.GenerateRequest{Prompt: &v1.GenerateRequest_Chat{Chat: prompt}}}
}

// User is a turn of the user.
func User(text string) *v1.ChatMessage { return Message("user", text) }

// Assistant is a turn of the model.
func Assistant(text string) *v1.ChatMessage { return Message("assistant", text) }

// System is a turn that sets the scene.
func System(text string) *v1.ChatMessage { return Message("system", text) }

// Message is a turn of any role that the template knows.
func Message(role, text string) *v1.ChatMessage {
	part := &v1.ContentPart{Part: &v1.ContentPart_Text{Text: text}}
	return &v1.ChatMessage{Role: role, Content: []*v1.ContentPart{part}}
}

func (r Request) generate() *v1.GenerateRequest {
	return &v1.GenerateRequest{
		RequestId: r.RequestID, Model: r.Model, Options: r.Options, Delivery: r.Delivery, Prompt: r.Prompt.holder.GetPrompt(),
	}
}

// complete is the request of the unary call: its fields are those of the streaming one.
func (r Request) complete() *v1.CompleteRequest {
	request := &v1.CompleteRequest{RequestId: r.RequestID, Model: r.Model, Options: r.Options, Delivery: r.Delivery}
	switch prompt := r.Prompt.holder.GetPrompt().(type) {
	case *v1.GenerateRequest_Text:
		request.Prompt = &v1.CompleteRequest_Text{Text: prompt.Text}
	case *v1.GenerateRequest_Tokens:
		request.Prompt = &v1.CompleteRequest_Tokens{Tokens: prompt.Tokens}
	case *v1.GenerateRequest_Chat:
		request.Prompt = &v1.CompleteRequest_Chat{Chat: prompt.Chat}
	}
	return request
}

// abortRequest names a generation by the server's id, or where that is not known by the caller's.
func abortRequest(generationID, requestID string) *v1.AbortRequest {
	if generationID != "" {
		return &v1.AbortRequest{Target: &v1.AbortRequest_GenerationId{GenerationId: generationID}}
	}
	return &v1.AbortRequest{Target: &v1.AbortRequest_RequestId{RequestId: requestID}}
}
